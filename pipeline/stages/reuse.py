"""Reuse: a request that has an answer is not computed again. The answer is in the store, or is that
of the same request in its group.

An output depends on the verifier's weights, the numeric class, the prompt, the sampling and the
seed, and on nothing else. Where all of them are the same, the answer is the same, bit for bit.
A share of the known answers is computed again all the same and compared.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from itertools import chain

import orjson

from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import StoreError
from specbatch.schemas.mapper import as_float32
from specbatch.schemas.numeric_class import UNKNOWN
from specbatch.schemas.records import (
    Answered,
    CompletionRecord,
    FinishReason,
    JobRow,
    Origin,
    PromptRow,
    SamplingParams,
)
from specbatch.schemas.spec import JobSpec

log = logging.getLogger(__name__)

# What a report has of reuse: see `Reuse.report`.
REUSED, REUSED_TOKENS, SAVED_USD = "reused", "reused_tokens", "reuse_saved_usd"
CHECKED, DIFFERING = "reuse_checked", "reuse_differing"
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Reuse:
    """Of a group: what need not be computed, and the answers that are computed again. All by
    request id, which is also how `reused_from` names a completion."""

    sources: Mapping[str, Answered] = field(default_factory=dict)  # answers of the store
    repeats: Mapping[str, str] = field(default_factory=dict)  # the first of the same requests here
    to_check: Mapping[str, Answered] = field(default_factory=dict)

    @property
    def is_any(self) -> bool:
        return bool(self.sources or self.repeats)

    def left(self, by_row: Sequence[Sequence[Request]]) -> list[list[Request]]:
        """The requests that the engine has to answer; rows without one are left out."""
        known = self.sources.keys() | self.repeats.keys()
        rows = ([r for r in row if r.request_id not in known] for row in by_row)
        return [row for row in rows if row]

    def with_copies(self, computed: Iterable[Completion]) -> list[Completion]:
        """What the engine has computed, and what is the same."""
        done = {completion.request_id: completion for completion in computed}
        copies = [_of_record(request_id, answer) for request_id, answer in self.sources.items()]
        copies += [
            _copy(done[first], request_id, done[first].finish_reason, first)
            for request_id, first in self.repeats.items()
            if first in done
        ]
        return [*done.values(), *copies]

    def figures(
        self, job_id: str, completions: Iterable[Completion], records: Iterable[CompletionRecord]
    ) -> dict[str, float]:
        """For the job's report, after comparing what was computed again."""
        copies = [record for record in records if record.reused_from is not None]
        costs = {f"{job_id}/{r.row_index}/{r.sample_index}": r.cost_usd for r in records}
        costs |= {answer.name: answer.record.cost_usd for answer in self.sources.values()}
        checked, differing = self._compared(job_id, completions)
        figures = {
            REUSED: len(copies),
            REUSED_TOKENS: sum(len(record.token_ids) for record in copies),
            SAVED_USD: sum(costs[str(record.reused_from)] for record in copies),
            CHECKED: checked,
            DIFFERING: differing,
        }
        return {name: float(value) for name, value in figures.items() if value}

    def _compared(self, job_id: str, completions: Iterable[Completion]) -> tuple[int, int]:
        """How many answers were computed again, and how many of them differ."""
        checked = differing = 0
        for done in completions:
            answer = self.to_check.get(done.request_id)
            if answer is None or done.error is not None:
                continue
            checked += 1
            if _is_same(done, answer.record):
                continue
            differing += 1
            log.error(
                "%s is not what %s says, though weights, numeric class, prompt, sampling and seed "
                "are the same: audit both jobs with `specbatch audit`, and submit job %s without "
                "reuse_outputs until you know why",
                *(done.request_id, answer.name, job_id),
            )
        return checked, differing


NO_REUSE = Reuse()


def known_answers(
    store: Store, job: JobRow, spec: JobSpec, by_row: Sequence[Sequence[Request]]
) -> Reuse:
    """What the store knows of these requests; the job's model and numeric class are pinned."""
    if not may_reuse(job, spec):
        return NO_REUSE
    requests: defaultdict[bytes, list[str]] = defaultdict(list)
    for request in chain.from_iterable(by_row):
        digest = request_digest(job, request.prompt_ids, request.params, request.seed)
        requests[digest].append(request.request_id)
    try:
        answers = store.answered(job.tenant, list(requests))
    except StoreError as error:
        log.warning("job %s: earlier answers cannot be read: %s", job.job_id, error)
        return NO_REUSE
    sources: dict[str, Answered] = {}
    repeats: dict[str, str] = {}
    to_check: dict[str, Answered] = {}
    for digest, (first, *others) in requests.items():
        answer = answers.get(digest)
        if answer is None:
            repeats |= dict.fromkeys(others, first)
        elif _is_drawn(first, spec.reuse_check):
            to_check[first] = answer
            repeats |= dict.fromkeys(others, first)
        else:
            sources |= dict.fromkeys((first, *others), answer)
    return Reuse(sources, repeats, to_check)


def offer_answers(
    store: Store,
    job: JobRow,
    spec: JobSpec,
    rows: Iterable[PromptRow],
    records: Iterable[CompletionRecord],
) -> None:
    """Keep what was computed for later requests. Without it only speed is lost."""
    answers = _answers_of(job, spec, rows, records)
    if not answers:
        return
    try:
        store.offer_answers(job.job_id, answers)
    except StoreError as error:
        log.warning("answers of job %s cannot be reused: %s", job.job_id, error)


def _answers_of(
    job: JobRow, spec: JobSpec, rows: Iterable[PromptRow], records: Iterable[CompletionRecord]
) -> dict[bytes, tuple[int, int]]:
    """The (row, sample) that answers a request; none of a job without reuse."""
    by_index = {row.row_index: row for row in rows}
    found = {}
    for record in records:
        decided = replace(
            job,
            numeric_class=record.numeric_class,
            model_fingerprint=record.model_fingerprint,
        )
        is_new = record.reused_from is None and record.error is None
        if is_new and record.finish_reason is not FinishReason.ERROR and may_reuse(decided, spec):
            row = by_index[record.row_index]
            params = spec.sampling.params(dict(row.overrides))
            digest = request_digest(decided, row.prompt_ids, params, record.seed)
            found[digest] = (record.row_index, record.sample_index)
    return found


def may_reuse(job: JobRow, spec: JobSpec) -> bool:
    """Whether the job wants it, all that bits depend on is known, and its texts are kept."""
    is_known = not {job.numeric_class, job.model_fingerprint} & {None, UNKNOWN}
    return spec.reuse_outputs and job.privacy.is_full and is_known


def request_digest(
    job: JobRow, prompt_ids: Sequence[int], params: SamplingParams, seed: int
) -> bytes:
    """Equal for requests that have the same answer. Greedy answers do not depend on the seed."""
    of_format = [version("specbatch"), version("llguidance")] if params.form else []
    said = [
        *("specbatch request 1", job.model_fingerprint, job.numeric_class, list(prompt_ids)),
        *(asdict(params), seed if params.temperature else 0, of_format),
    ]
    data = orjson.dumps(said, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(data).digest()[:_DIGEST_BYTES]


def _of_record(request_id: str, answer: Answered) -> Completion:
    """A completion of the store, as the engine gives it."""
    record = answer.record
    # That calls of functions stood before the stop is found out again when it is recorded.
    calls = record.finish_reason is FinishReason.TOOL_CALLS
    reason = FinishReason.STOP if calls else record.finish_reason
    return _copy(record, request_id, reason, answer.name)


def _copy(
    of: Completion | CompletionRecord, request_id: str, reason: FinishReason, source: str
) -> Completion:
    """What was said, without what it took: no pass decided it here."""
    return Completion(
        request_id=request_id,
        token_ids=tuple(of.token_ids),
        origins=(Origin.PLAIN,) * len(of.token_ids),
        logprobs=tuple(of.logprobs),
        finish_reason=reason,
        proposed=0,
        accepted=0,
        verifier_passes=0,
        compute_sec=0.0,
        decode_sec=0.0,
        baseline_sec=0.0,
        proposed_at_depth=(),
        accepted_at_depth=(),
        error=of.error,
        top_logprobs=of.top_logprobs,
        reused_from=source,
    )


def _is_same(done: Completion, record: CompletionRecord) -> bool:
    said, computed = record.logprobs, as_float32(done.logprobs)
    return tuple(done.token_ids) == tuple(record.token_ids) and _bits(computed) == _bits(said)


def _bits(values: Sequence[float]) -> list[str]:
    return [value.hex() for value in as_float32(values)]


def _is_drawn(request_id: str, share: float) -> bool:
    drawn = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(drawn, "big") < share * 2.0**64
