"""Makes training sequences of what the store keeps: prompts, and what the verifier wrote to them.

Only jobs of one tenant whose texts may be kept whole, and only outputs that ended well. The same
store, order and window give the same data set. Whether a prompt is held out follows from its tokens
alone, so equal prompts are on one side in every job, and the same ones in every training: a model
and its descendants never learn from them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.contract import MOST_JOBS, Store
from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.storage.prompts import PromptFinder, in_order
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.days import DAY_SEC
from specbatch.schemas.errors import UsageError
from specbatch.schemas.fingerprint import shown
from specbatch.schemas.records import FINISHED, CompletionRecord, JobRow
from specbatch.schemas.speculation import VOCABULARY
from specbatch.schemas.training import DataOrder

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
OnProgress = Callable[[int, int], None]

_PAGE = 500  # completions
# Reasons for omitting completions, as messages name them.
ENDED_BADLY = "did not end well"
TOKENS_GONE = "have no tokens, or masked ones"
PROMPT_GONE = "have no prompt any more"
OTHER_MODEL = "were decided by another verifier"
FOREIGN = "have tokens that the proposer lacks"
TOO_LONG = "have a prompt that fills the proposer's context"
REPEATED = "repeat another one"
TOO_MANY = "are more than the most tokens"


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A prompt with one of its completions."""

    digest: bytes  # of both
    prompt_digest: bytes
    ids: Ints  # [prompt + completion]
    prompt_tokens: int
    top_ids: Ints | None = None  # [completion, n], where the most likely tokens are kept
    top_logprobs: Floats | None = None  # [completion, n]

    @property
    def completion_tokens(self) -> int:
        return len(self.ids) - self.prompt_tokens


@dataclass(frozen=True, slots=True)
class DataSet:
    """Examples in three parts, each ordered by digest."""

    train: tuple[Example, ...]
    choosing: tuple[Example, ...]  # held out: the best checkpoint is chosen by these
    judging: tuple[Example, ...]  # held out: the figures come from these
    jobs: tuple[JobRow, ...]  # that it was made of, oldest first
    verifier: str | None  # fingerprint of what decided the tokens; None of jobs without
    left_out: Counter[str] = field(default_factory=Counter)  # completions, by reason
    skipped: tuple[str, ...] = ()  # jobs that gave nothing, each with its reason

    @property
    def digest(self) -> str:
        """Of all that training depends on."""
        found = hashlib.sha256()
        for part in (self.train, self.choosing, self.judging):
            found.update(len(part).to_bytes(8))
            for one in part:
                found.update(one.digest)
                for array in (one.top_ids, one.top_logprobs):
                    found.update(b"" if array is None else array.tobytes())
        return found.hexdigest()


@dataclass(frozen=True, slots=True)
class Wanted:
    """The model that data are made for: what its token ids mean, and how many it reads."""

    vocabulary: str
    vocab_size: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """A job that gives nothing, and why."""

    job: JobRow
    reason: str

    def __str__(self) -> str:
        return f"job {self.job.job_id} ({self.job.name}) {self.reason}"


@dataclass(frozen=True, slots=True)
class DataSets:
    """Makes data sets of one store's jobs."""

    store: Store
    objects: Objects
    retention_days: dict[str, float]

    def make(
        self,
        order: DataOrder,
        wanted: Wanted,
        to: str,
        on_progress: OnProgress = lambda *_: None,
        what: str = "training",
    ) -> DataSet:
        """`what` the data are for and `to` where they go, for the jobs' audit logs. `on_progress`
        gets how many completions were read, and of how many.

        Raises `UsageError` if no job fits, or one that was named cannot be used.
        """
        jobs, skipped = self._jobs(order, wanted)
        left_out: Counter[str] = Counter()
        found: dict[bytes, Example] = {}
        counts = {job.job_id: self.store.progress(job.job_id).completions for job in jobs}
        total = sum(counts.values())
        tokens = read = 0
        used: list[JobRow] = []
        for job in reversed(jobs):  # the newest first, as far as there is room
            if tokens >= order.most_tokens:
                skipped.append(Skipped(job, f"is older than {order.most_tokens:,} newer tokens"))
                continue
            used.insert(0, job)
            self.store.note_action(job.job_id, EntryKind.EXPORTED, {"what": what, "to": to})
            unread = counts[job.job_id]
            for example in self._examples(job, jobs[-1], wanted, left_out):
                unread -= 1
                read += 1
                on_progress(read, total)
                if example is None:
                    continue
                known = found.get(example.digest)
                left_out[REPEATED] += known is not None
                tokens += 0 if known else example.completion_tokens
                if known is None or known.top_ids is None:
                    found[example.digest] = example
                if tokens >= order.most_tokens:
                    left_out[TOO_MANY] += max(unread, 0)
                    break
        examples = sorted(found.values(), key=lambda one: one.digest)
        train, choosing, judging = _split(examples, order.held_out)
        return DataSet(
            *(train, choosing, judging),
            jobs=tuple(used),
            verifier=jobs[-1].model_fingerprint,
            left_out=left_out,
            skipped=tuple(map(str, skipped)),
        )

    # --- jobs -----------------------------------------------------------------------------------
    def _jobs(self, order: DataOrder, wanted: Wanted) -> tuple[list[JobRow], list[Skipped]]:
        """Jobs that fit, oldest first, and which do not and why."""
        ended = list(self._ended(order.tenant))
        days = self.retention_days.get(order.tenant)
        over = set() if days is None else {j.job_id for j in self._ended(order.tenant, days)}
        taken: list[JobRow] = []
        skipped: list[Skipped] = []
        for job in (job for job in ended if _is_asked_for(job, order)):
            reason = "is past its tenant's retention" if job.job_id in over else None
            reason = reason or _reason_to_skip(job, wanted)
            if reason is None:
                taken.append(job)
            else:
                skipped.append(Skipped(job, reason))
        verifier = order.verifier or (taken[-1].model_fingerprint if taken else None)
        others = [job for job in taken if job.model_fingerprint != verifier]
        skipped += [Skipped(job, f"has another verifier ({_known(job)})") for job in others]
        taken = [job for job in taken if job not in others]
        _check_jobs(order, taken, ended, skipped)
        return taken, skipped

    def _ended(self, tenant: str, days: float = 0.0) -> Iterator[JobRow]:
        """Jobs that ended so many days ago by the store's clock and are not wholly purged."""
        last: JobRow | None = None
        while page := self.store.ended_jobs(days * DAY_SEC, tenant, MOST_JOBS, after=last):
            yield from page
            last = page[-1]

    # --- their outputs --------------------------------------------------------------------------
    def _examples(
        self, job: JobRow, newest: JobRow, wanted: Wanted, left_out: Counter[str]
    ) -> Iterator[Example | None]:
        """One for each completion of the job; None for those that are left out."""
        where = partial(self.store.prompts_of, job.job_id)
        prompts = PromptFinder(in_order(self.objects, job, where))
        for record in self.store.completions(job.job_id, batch=_PAGE):
            prompt = prompts.of(record.row_index)
            reason = _reason_to_omit(record, prompt, newest, wanted)
            if reason is None and prompt is not None:
                yield _example(prompt, record, wanted)
            else:
                left_out[str(reason)] += 1
                yield None


def _is_asked_for(job: JobRow, order: DataOrder) -> bool:
    ended = job.finished_at or 0.0
    in_time = (order.since is None or order.since <= ended) and (
        order.until is None or ended <= order.until
    )
    return in_time and (not order.jobs or any(_is_named(job, name) for name in order.jobs))


def _is_named(job: JobRow, name: str) -> bool:
    return job.name == name or (len(name) >= rules.MIN_PREFIX and job.job_id.startswith(name))


def _reason_to_skip(job: JobRow, wanted: Wanted) -> str | None:
    """Why nothing may or can be learned from an ended job; None: it fits."""
    if job.purged_at is not None:
        return "was purged"
    if not job.privacy.is_full:
        return f"is kept {job.privacy}"
    if job.report.get(VOCABULARY) != wanted.vocabulary:
        return "has a verifier with other tokens than the proposer"
    return None


def _known(job: JobRow) -> str:
    return "not known" if job.model_fingerprint is None else shown(job.model_fingerprint)


def _check_jobs(
    order: DataOrder, taken: Sequence[JobRow], ended: Sequence[JobRow], skipped: Sequence[Skipped]
) -> None:
    """Raise `UsageError` if there are no jobs, or none of a name that was asked for."""
    nothing = f"nothing to learn from for tenant {order.tenant!r}"
    for name in order.jobs:
        if not any(_is_named(job, name) for job in taken):
            reasons = [one for one in skipped if _is_named(one.job, name)]
            why = reasons[-1] if reasons else f"no job {name!r} of it ended in this time"
            raise UsageError(f"{nothing}: {why}")
    if not taken:
        why = skipped[-1] if skipped else f"{len(ended):,} of its jobs ended, none in this time"
        raise UsageError(f"{nothing}: {why}")


def _reason_to_omit(
    record: CompletionRecord, prompt: Sequence[int] | None, newest: JobRow, wanted: Wanted
) -> str | None:
    if record.finish_reason not in FINISHED or record.error is not None:
        return ENDED_BADLY
    if not record.token_ids or not rules.is_whole(record.token_ids):
        return TOKENS_GONE
    if prompt is None or not prompt or not rules.is_whole(prompt):
        return PROMPT_GONE
    if record.model_fingerprint not in (None, newest.model_fingerprint):
        return OTHER_MODEL
    if max(max(prompt), max(record.token_ids)) >= wanted.vocab_size:
        return FOREIGN
    return TOO_LONG if len(prompt) >= wanted.context_tokens else None


def _example(prompt: Sequence[int], record: CompletionRecord, wanted: Wanted) -> Example:
    """Cut off where the proposer's context ends."""
    room = wanted.context_tokens - len(prompt)
    ids = np.array([*prompt, *record.token_ids[:room]], dtype=np.int32)
    prompt_digest = hashlib.sha256(ids[: len(prompt)].tobytes()).digest()
    whole = hashlib.sha256(prompt_digest + ids[len(prompt) :].tobytes()).digest()
    top_ids, top_logprobs = _tops(record, len(ids) - len(prompt))
    return Example(
        digest=whole,
        prompt_digest=prompt_digest,
        ids=ids,
        prompt_tokens=len(prompt),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def _tops(record: CompletionRecord, tokens: int) -> tuple[Ints | None, Floats | None]:
    tops = (record.top_logprobs or ())[:tokens]
    if len(tops) != tokens or not tops[0][0]:
        return None, None
    ids = np.array([ids for ids, _ in tops], dtype=np.int32)
    return ids, np.array([values for _, values in tops], dtype=np.float32)


Part = tuple[Example, ...]


def _split(examples: Sequence[Example], held_out: float) -> tuple[Part, Part, Part]:
    """Training, choosing, judging: by the prompt's digest alone."""
    parts: tuple[list[Example], list[Example], list[Example]] = ([], [], [])
    for one in examples:
        place = int.from_bytes(one.prompt_digest[:8]) / 2**64
        part = 1 if place < held_out / 2 else 2 if place < held_out else 0
        parts[part].append(one)
    return tuple(parts[0]), tuple(parts[1]), tuple(parts[2])
