"""Content policies judge a group's texts, on the worker that has verified them.

They are asked in the order of the spec; each sees the text as those before have left it. Nothing is
asked once a completion is blocked. A policy that gives no verdict counts as its `on_error` says.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

from specbatch.pipeline.engines.contract import Completion, Engines
from specbatch.pipeline.inputs.contract import RowError
from specbatch.pipeline.moderation import judge
from specbatch.pipeline.moderation.hooks import Hooks
from specbatch.pipeline.moderation.outcome import published_as, without_text
from specbatch.pipeline.moderation.patterns import Patterns
from specbatch.pipeline.stages.judging import Asker, Judging, place_of
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
from specbatch.schemas.records import FINISHED, CompletionRecord, JobRow, PromptRow
from specbatch.schemas.spec import JobSpec

log = logging.getLogger(__name__)


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
    """Asks a job's policies about a group's completions."""

    judging: Judging

    def judged(self, records: Sequence[CompletionRecord]) -> tuple[list[CompletionRecord], Rulings]:
        """The records, with what judging them cost, and every policy's verdict.

        Raises `UsageError` for a policy that is not installed, and `RequestCancelledError`.
        """
        judging, policies = self.judging, self.judging.spec.policies
        if not policies:
            return list(records), {}
        open_ = judging.inputs(judging.with_texts(records)[0])
        rulings: dict[Place, list[Ruled]] = {place: [] for place in open_}
        spent: Counter[Place] = Counter()
        for name, policy in zip(names_of(policies), policies, strict=True):
            for place, ruled, ticks in self._asked(name, policy, open_):
                rulings[place].append(ruled)
                spent[place] += ticks
                if ruled.verdict.text is not None:
                    open_[place] = replace(open_[place], text=ruled.verdict.text)
                if ruled.verdict.ruling is Ruling.BLOCK:
                    del open_[place]
        return [judging.charged(record, spent[place_of(record)]) for record in records], rulings

    def _asked(
        self, name: str, policy: PolicySpec, given: Mapping[Place, PolicyInput]
    ) -> list[tuple[Place, Ruled, int]]:
        """By completion: the verdict, and the units of device time that it took."""
        if policy.use == JUDGE:
            return self._by_verifier(name, policy, given)
        if policy.use == PATTERNS:
            patterns = Patterns(policy)
            version_ = patterns.version
            ask = Asker(lambda one: patterns.judge(one.text))
        else:
            hook = self.judging.hooks.of(policy.use)
            options, timeout = policy.options, policy.timeout_sec
            version_ = hook.version
            ask = Asker(lambda one: hook.judge(one, options, timeout))
        answers = [(place, *ask.timed(one)) for place, one in given.items()]
        if ask.failures:
            self._log_failures(name, policy, ask.failures, ask.reason)
        return [
            (place, Ruled(name, version_, said or policy.if_failed, sec), 0)
            for place, said, sec in answers
        ]

    def _by_verifier(
        self, name: str, policy: PolicySpec, given: Mapping[Place, PolicyInput]
    ) -> list[tuple[Place, Ruled, int]]:
        judging, prompt = self.judging, policy.prompt
        assert prompt is not None, "a judge has one"
        try:
            done = [c for (c,) in judging.of_verifier(name, prompt, given, [judge.ANSWER])]
        except RowError as error:  # the template takes no such chat
            self._log_failures(name, policy, len(given), error.code)
            return [(p, Ruled(name, "", policy.if_failed), 0) for p in given]
        answers = judging.tokenizer.decode_batch([c.token_ids for c in done])
        by = f"{judging.job.verifier} {shown(judging.job.model_fingerprint or 'unknown')}"
        version_ = f"specbatch {version('specbatch')} on {by}"
        failed = [c for c in done if c.error is not None]
        if failed:
            self._log_failures(name, policy, len(failed), str(failed[0].error))
        return [
            (
                place,
                Ruled(name, version_, _answered(policy, c, answer), c.compute_sec),
                c.ticks.total,
            )
            for place, c, answer in zip(given, done, answers, strict=True)
        ]

    def _log_failures(self, name: str, policy: PolicySpec, count: int, why: str) -> None:
        log.error(
            "policy `%s` gave no verdict on %d completions of job %s (%s): on_error says %s",
            *(name, count, self.judging.job.job_id, why, policy.on_error),
        )


def _answered(policy: PolicySpec, completion: Completion, answer: str) -> Verdict:
    return policy.if_failed if completion.error else judge.verdict_of(policy, answer)


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
        ruled = rulings.get(place_of(record))
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
