"""Content policies judge a group's texts, on the worker that has verified them.

They are asked in the order of the spec; each sees the text as those before have left it. Nothing is
asked once a completion is blocked. A policy that gives no verdict counts as its `on_error` says.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

from specbatch.pipeline.engines.contract import Completion, Engines, Request, Ticket
from specbatch.pipeline.inputs.contract import RowError
from specbatch.pipeline.moderation import judge
from specbatch.pipeline.moderation.hooks import HookFailedError, Hooks
from specbatch.pipeline.moderation.outcome import published_as, without_text
from specbatch.pipeline.moderation.patterns import Patterns
from specbatch.pipeline.policy.costs.pricing import cost_units
from specbatch.pipeline.runtime.tokenizers import Tokenizers
from specbatch.pipeline.stages.texts import with_text
from specbatch.pipeline.storage.artefacts import Rulings
from specbatch.schemas.errors import ObjectError
from specbatch.schemas.fingerprint import shown
from specbatch.schemas.policies import (
    FAILED,
    JUDGE,
    NO_VERDICT,
    PATTERNS,
    Place,
    PolicyInput,
    PolicySpec,
    Ruled,
    Ruling,
    Verdict,
    in_report,
    names_of,
    outcome,
)
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.provenance import Ticks
from specbatch.schemas.records import (
    FINISHED,
    CompletionRecord,
    JobRow,
    PromptRow,
    request_id_of,
)
from specbatch.schemas.spec import JobSpec
from specbatch.schemas.timekeeping import usd_of

log = logging.getLogger(__name__)

MOST_FAILURES = 3  # of a policy in a row; the rest of the group is not asked any more


def prepare(spec: JobSpec, hooks: Hooks, engines: Engines) -> None:
    """Find out before a group is verified whether its policies can be asked here, and load what
    judges. Raises `UsageError`, `MissingExtraError`."""
    for policy in spec.policies:
        if policy.use == JUDGE:
            engines.service(spec.engine)
        elif policy.use == PATTERNS:
            Patterns(policy)
        else:
            hooks.of(policy.use).load()


@dataclass(frozen=True, slots=True)
class Moderation:
    """What judging a group's completions takes."""

    job: JobRow
    spec: JobSpec
    rows: Sequence[PromptRow]
    tokenizers: Tokenizers
    hooks: Hooks
    engines: Engines
    tickets: list[Ticket]  # questions to the verifier are added: their time is the group's
    price_microusd: int  # of an hour of the device

    def judged(self, records: Sequence[CompletionRecord]) -> tuple[list[CompletionRecord], Rulings]:
        """The records, with what judging them cost, and every policy's verdict.

        Raises `UsageError` for a policy that is not installed, and `RequestCancelledError`.
        """
        if not self.spec.policies:
            return list(records), {}
        open_ = dict(self._inputs(records))
        rulings: dict[Place, list[Ruled]] = {place: [] for place in open_}
        spent: Counter[Place] = Counter()
        for name, policy in zip(names_of(self.spec.policies), self.spec.policies, strict=True):
            for place, ruled, ticks in self._asked(name, policy, open_):
                rulings[place].append(ruled)
                spent[place] += ticks
                if ruled.verdict.text is not None:
                    open_[place] = replace(open_[place], text=ruled.verdict.text)
                if ruled.verdict.ruling is Ruling.BLOCK:
                    del open_[place]
        return [self._charged(record, spent[_place(record)]) for record in records], rulings

    def _inputs(self, records: Sequence[CompletionRecord]) -> Iterable[tuple[Place, PolicyInput]]:
        tokenizer = self.tokenizers.of_job(self.job)
        texts = tokenizer.decode_batch([record.token_ids for record in records])
        prompts = {row.row_index: tokenizer.decode(row.prompt_ids) for row in self.rows}
        for record in with_text(records, texts, self.rows, self.spec, tokenizer.decode):
            if record.finish_reason in FINISHED:
                yield (
                    _place(record),
                    PolicyInput(
                        text=record.text,
                        prompt=prompts[record.row_index],
                        row_id=record.row_id,
                        tag=record.tag,
                        finish_reason=record.finish_reason.value,
                    ),
                )

    def _asked(
        self, name: str, policy: PolicySpec, given: Mapping[Place, PolicyInput]
    ) -> list[tuple[Place, Ruled, int]]:
        """By completion: the verdict, and the units of device time that it took."""
        if policy.use == JUDGE:
            return self._by_verifier(name, policy, given) if given else []
        if policy.use == PATTERNS:
            patterns = Patterns(policy)
            version_ = patterns.version
            ask = _Asker(name, policy, lambda one: patterns.judge(one.text))
        else:
            hook = self.hooks.of(policy.use)
            options, timeout = policy.options, policy.timeout_sec
            version_ = hook.version
            ask = _Asker(name, policy, lambda one: hook.judge(one, options, timeout))
        answers = [(place, *ask.timed(one)) for place, one in given.items()]
        ask.log(self.job.job_id)
        return [(p, Ruled(name, version_, said, sec), 0) for p, said, sec in answers]

    # --- the verifier as judge -------------------------------------------------------------------
    def _by_verifier(
        self, name: str, policy: PolicySpec, given: Mapping[Place, PolicyInput]
    ) -> list[tuple[Place, Ruled, int]]:
        tokenizer = self.tokenizers.of_job(self.job)
        plain = tokenizer.without_special
        asked = [judge.question(policy, one, plain) for one in given.values()]
        with_template = tokenizer.has_chat_template
        if with_template:
            try:
                asked = [tokenizer.render([{"role": "user", "content": text}]) for text in asked]
            except RowError as error:  # the template takes no such chat
                _log_failures(name, policy, self.job.job_id, len(given), error.code)
                return [(p, Ruled(name, "", policy.if_failed), 0) for p in given]
        prompts = tokenizer.encode_batch(asked, special=not with_template)
        service = self.engines.service(self.spec.engine)
        grammar = tokenizer.grammar(judge.ANSWER.form, self.engines.model.vocab_size)
        requests = [
            Request(
                request_id=f"{request_id_of(self.job.job_id, *place)}/{name}",
                prompt_ids=tuple(ids),
                params=replace(judge.ANSWER, stop_token_ids=tuple(tokenizer.eos_ids)),
                seed=0,
                depth=0,
                grammar=grammar,
            )
            for place, ids in zip(given, prompts, strict=True)
        ]
        # No request of the job: what the job teaches about drafts is not told to this ticket, and
        # answers are given to the end though the job is stopped.
        ticket = service.submit(f"{self.job.job_id}/policies", requests)
        self.tickets.append(ticket)
        done = ticket.wait()
        answers = tokenizer.decode_batch([c.token_ids for c in done])
        by = f"{self.job.verifier} {shown(self.job.model_fingerprint or 'unknown')}"
        result = []
        for place, completion, answer in zip(given, done, answers, strict=True):
            said = _answered(policy, completion, answer)
            ruled = Ruled(name, f"specbatch {version('specbatch')} on {by}", said)
            ruled = replace(ruled, sec=completion.compute_sec)
            result.append((place, ruled, completion.ticks.total))
        failed = [c for c in done if c.error is not None]
        if failed:
            _log_failures(name, policy, self.job.job_id, len(failed), str(failed[0].error))
        return result

    def _charged(self, record: CompletionRecord, ticks: int) -> CompletionRecord:
        """With the device time of its judge, which is overhead of its own."""
        if not ticks:
            return record
        usd = usd_of(cost_units(ticks, self.price_microusd))
        return replace(
            record, ticks=record.ticks + Ticks(overhead=ticks), cost_usd=record.cost_usd + usd
        )


@dataclass(slots=True)
class _Asker:
    """Asks a policy that may fail."""

    name: str
    policy: PolicySpec
    ask: Callable[[PolicyInput], Verdict]
    failures: int = 0
    in_a_row: int = 0
    why: str = ""

    def timed(self, given: PolicyInput) -> tuple[Verdict, float]:
        """Its verdict, or that of `on_error`; and the seconds that it took."""
        if self.in_a_row >= MOST_FAILURES:
            self.failures += 1
            return self.policy.if_failed, 0.0
        begun = time.monotonic()
        try:
            said, self.in_a_row = self.ask(given), 0
        except HookFailedError as error:
            said, self.why = self.policy.if_failed, str(error)
            self.failures, self.in_a_row = self.failures + 1, self.in_a_row + 1
        return said, time.monotonic() - begun

    def log(self, job_id: str) -> None:
        if self.failures:
            _log_failures(self.name, self.policy, job_id, self.failures, self.why)


def _log_failures(name: str, policy: PolicySpec, job_id: str, count: int, why: str) -> None:
    log.error(
        "policy `%s` gave no verdict on %d completions of job %s (%s): on_error says %s",
        *(name, count, job_id, why, policy.on_error),
    )


def _answered(policy: PolicySpec, completion: Completion, answer: str) -> Verdict:
    return policy.if_failed if completion.error else judge.verdict_of(policy, answer)


def _place(record: CompletionRecord) -> Place:
    return record.row_index, record.sample_index


# --- when they are recorded ----------------------------------------------------------------------
def with_rulings(
    records: Sequence[CompletionRecord],
    texts: Sequence[str],
    rows: Sequence[PromptRow],
    rulings: Rulings,
    job: JobRow,
    spec: JobSpec,
) -> list[CompletionRecord]:
    """The records as the policies have left them. Where a tenant's texts are not kept, nobody could
    review them later: then they are blocked. `texts` are of all their tokens.

    Raises `ObjectError` for a completion that no policy has seen, though its job has some.
    """
    if not spec.policies:
        return list(records)
    done, forms = [], forms_of(rows, spec)
    for record, whole in zip(records, texts, strict=True):
        ruled = rulings.get(_place(record))
        if record.finish_reason not in FINISHED:  # whatever it wrote, nobody has judged it
            done.append(without_text(record))
            continue
        if ruled is None:
            raise ObjectError(
                f"the verdicts of the job's policies on row {record.row_index} are not in its "
                "results; the workspace was damaged"
            )
        kept = [_for_kept_texts(one, job) for one in ruled]
        done.append(published_as(record, whole, kept, forms[record.row_index]))
    return done


def forms_of(rows: Sequence[PromptRow], spec: JobSpec) -> dict[int, str]:
    """By row, what its outputs are held to (`SamplingParams.form`)."""
    return {row.row_index: spec.sampling.params(dict(row.overrides)).form for row in rows}


def is_for_review(ruled: Sequence[Ruled]) -> bool:
    by = outcome(ruled)
    return by is not None and by.verdict.ruling is Ruling.REVIEW


def _for_kept_texts(ruled: Ruled, job: JobRow) -> Ruled:
    if ruled.verdict.ruling is not Ruling.REVIEW or job.privacy is PrivacyMode.FULL:
        return ruled
    return replace(ruled, verdict=Verdict.block(ruled.verdict.code))


def policy_report(records: Iterable[CompletionRecord]) -> dict[str, float]:
    """What the verdicts on a group's records add to their job's report."""
    counts = Counter[str]()
    for record in records:
        by = outcome(record.rulings)
        counts[in_report(by.verdict.ruling) if by else ""] += 1
        counts[NO_VERDICT] += any(one.verdict.code == FAILED for one in record.rulings)
    return {name: float(count) for name, count in counts.items() if name and count}
