"""`output.best_by` scores the completions of a group of which only some are published.

It happens on the worker that has verified them, after the policies: what is scored is the text as
it would be published. Only completions that could be published count, and only rows that have more
of them than are kept. A completion without a score ranks behind those that have one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from specbatch.pipeline.engines.contract import Engines
from specbatch.pipeline.inputs.contract import RowError
from specbatch.pipeline.moderation import judge
from specbatch.pipeline.moderation.hook_process import SCORER
from specbatch.pipeline.moderation.hooks import Hooks
from specbatch.pipeline.stages.judging import Asker, Judging, place_of
from specbatch.pipeline.stages.moderation import with_rulings
from specbatch.pipeline.storage.artefacts import Rulings
from specbatch.schemas.best_by import NO_JUDGE_HERE, SCORED, UNSCORED, BestBySpec
from specbatch.schemas.errors import UsageError
from specbatch.schemas.numeric_class import masks_logprobs
from specbatch.schemas.policies import JUDGE, Place, PolicyInput
from specbatch.schemas.records import FINISHED, CompletionRecord, JobRow, PromptRow
from specbatch.schemas.spec import JobSpec

log = logging.getLogger(__name__)

_NAME = "best_by"  # of its questions


def prepare_scoring(job: JobRow, spec: JobSpec, hooks: Hooks, engines: Engines) -> None:
    """Find out before a group is verified whether its completions can be scored here, and load what
    scores. Raises `UsageError`."""
    best_by = spec.output.best_by
    if best_by is None:
        return
    if best_by.use == JUDGE:
        if masks_logprobs(job.numeric_class):
            raise UsageError(NO_JUDGE_HERE)
        engines.service(spec.engine)
    else:
        hooks.of(best_by.use, SCORER).load()


@dataclass(frozen=True, slots=True)
class Scoring:
    """Scores a group's completions."""

    judging: Judging

    def scored(
        self, records: Sequence[CompletionRecord], rulings: Rulings
    ) -> list[CompletionRecord]:
        """The records with their scores, and with what these cost. `rulings`: of the policies.

        Raises `UsageError` for a scorer that is not installed, and `RequestCancelledError`.
        """
        best_by = self.judging.spec.output.best_by
        if best_by is None:
            return list(records)
        given = self._given(records, rulings)
        if best_by.use == JUDGE:
            found = self._by_verifier(best_by, given)
        else:
            found = {place: (score, 0) for place, score in self._by_hook(best_by, given)}
        done = []
        for record in records:
            score, ticks = found.get(place_of(record), (None, 0))
            done.append(replace(self.judging.charged(record, ticks), score=score))
        return done

    def _given(
        self, records: Sequence[CompletionRecord], rulings: Rulings
    ) -> dict[Place, PolicyInput]:
        """What is scored, as it would be published."""
        judging = self.judging
        done, texts = judging.with_texts(records)
        left = with_rulings(done, texts, judging.rows, rulings, judging.job, judging.spec)
        return judging.inputs(list(_competing(left, judging.rows, judging.spec)))

    def _by_verifier(
        self, best_by: BestBySpec, given: Mapping[Place, PolicyInput]
    ) -> dict[Place, tuple[float | None, int]]:
        """By completion: its score, and the units of device time that it took."""
        judging, prompt = self.judging, best_by.prompt
        assert prompt is not None, "a judge has one"
        try:
            answers = judging.of_verifier(_NAME, prompt, given, judge.EACH_ANSWER)
        except RowError as error:  # the template takes no such chat
            self._log_failures(best_by, len(given), error.code)
            return {}
        found, ends = {}, frozenset(judging.tokenizer.eos_ids)
        for place, (yes, no) in zip(given, answers, strict=True):
            score = judge.score_of(yes, no, ends)
            found[place] = (score, yes.ticks.total + no.ticks.total)
        if failed := sum(score is None for score, _ in found.values()):
            errors = (c.error for pair in answers for c in pair if c.error is not None)
            self._log_failures(best_by, failed, next(errors, "it gives neither answer"))
        return found

    def _by_hook(
        self, best_by: BestBySpec, given: Mapping[Place, PolicyInput]
    ) -> list[tuple[Place, float | None]]:
        hook = self.judging.hooks.of(best_by.use, SCORER)
        options, timeout = best_by.options, best_by.timeout_sec
        ask = Asker(lambda one: hook.score(one, options, timeout))
        found = [(place, ask.timed(one)[0]) for place, one in given.items()]
        if ask.failures:
            self._log_failures(best_by, ask.failures, ask.reason)
        return found

    def _log_failures(self, best_by: BestBySpec, count: int, why: str) -> None:
        log.error(
            "scorer `%s` gave no score to %d completions of job %s (%s): they rank behind others",
            *(best_by.use, count, self.judging.job.job_id, why),
        )


def _competing(
    records: Iterable[CompletionRecord], rows: Sequence[PromptRow], spec: JobSpec
) -> Iterable[CompletionRecord]:
    """Of records as they would be published, those that a score may choose."""
    keep = spec.output.keep_best
    chosen_from = {row.row_index for row in rows if keep is not None and row.n > keep}
    for record in records:
        is_good = record.finish_reason in FINISHED and not record.has_failed
        if is_good and record.row_index in chosen_from:
            yield record


def score_report(
    records: Iterable[CompletionRecord], rows: Sequence[PromptRow], spec: JobSpec
) -> dict[str, float]:
    """What a group's records, as they would be published, add to their job's report."""
    if spec.output.best_by is None:
        return {}
    scores = [record.score for record in _competing(records, rows, spec)]
    without = float(scores.count(None))
    return {SCORED: len(scores) - without, UNSCORED: without}
