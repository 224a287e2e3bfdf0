"""Two completions in one: tokens and passes follow one another, and all that was spent is there."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.pipeline.outputs.token_table import token_table
from specbatch.pipeline.stages.mending import (
    Mended,
    Outcome,
    charged_with,
    is_own,
    joined,
    mending_report,
)
from specbatch.pipeline.stages.requests import records_of
from specbatch.schemas.provenance import Provenance, Ticks, by_depth
from specbatch.schemas.records import (
    FinishReason,
    JobRow,
    JobState,
    Origin,
    PromptRow,
    Recheck,
    SamplingParams,
    Stage,
)
from specbatch.schemas.seeds import retry_seed, sample_seed
from specbatch.schemas.speculation import ShadowPair

PLAIN, ACCEPTED, CORRECTED, BONUS = Origin
JOB = JobRow(
    job_id="job", name="night", tenant="default", spec={}, spec_digest="", state=JobState.RUNNING,
    stage=Stage.RUN, verifier="v", proposer="p", output_uri="out", workspace_uri="w",
    idempotency_key=None, cancel_requested=False, error=None, rows_total=1, groups_total=1,
    prompt_tokens=2, created_at=0.0, started_at=1.0, finished_at=None,
)  # fmt: skip


def completion(origins: list[Origin], drafted: tuple[int, ...], **more: Any) -> Completion:
    """Whose passes follow from its origins; `sources` and `makers` are the caller's."""
    passes = sum(o is not ACCEPTED for o in origins)
    proposed, accepted = by_depth(origins, drafted)
    given: dict[str, Any] = {
        "request_id": "job/0/0",
        "token_ids": tuple(range(len(origins))),
        "origins": tuple(map(int, origins)),
        "logprobs": tuple(-float(i) for i in range(len(origins))),
        "finish_reason": FinishReason.LENGTH,
        "proposed": sum(drafted),
        "accepted": origins.count(ACCEPTED),
        "verifier_passes": passes,
        "compute_sec": 1.0,
        "decode_sec": 0.5,
        "baseline_sec": 0.75,
        "proposed_at_depth": proposed,
        "accepted_at_depth": accepted,
        "ticks": Ticks(prefill=10, verify=100 * passes),
    }
    return Completion(**given | more)


def passes(
    count: int, sources: tuple[str, ...], makers: tuple[int, ...], **more: Any
) -> Provenance:
    return Provenance(tuple(range(count)), (100,) * count, sources, makers, **more)


FIRST = completion(
    [PLAIN, ACCEPTED, CORRECTED],
    (2,),
    provenance=passes(2, ("ngram",), (0,), drafted=(2,), rejected=(9,)),
)
FURTHER = completion(
    [ACCEPTED, BONUS, CORRECTED],
    (1, 3),
    request_id="job/0/0/mend/0",
    finish_reason=FinishReason.STOP,
    provenance=passes(2, ("grammar", "ngram"), (1, 0), drafted=(1, 3), rejected=(8,)),
)


def test_what_goes_on_follows_what_was_there() -> None:
    whole = joined(FIRST, FURTHER)
    assert whole.request_id == FIRST.request_id
    assert whole.token_ids == (0, 1, 2, 0, 1, 2)
    assert whole.origins == (PLAIN, ACCEPTED, CORRECTED, ACCEPTED, BONUS, CORRECTED)
    assert whole.finish_reason is FinishReason.STOP
    assert (whole.proposed, whole.accepted, whole.verifier_passes) == (6, 2, 4)
    assert whole.provenance.sources == ("ngram", "grammar")
    assert whole.provenance.makers == (0, 0, 1)
    assert whole.provenance.drafted == (2, 1, 3)
    assert whole.provenance.rejected == (9, 8)
    assert (whole.proposed_at_depth, whole.accepted_at_depth) == by_depth(whole.origins, (2, 1, 3))
    assert whole.ticks == Ticks(prefill=20, verify=400)
    assert (whole.compute_sec, whole.decode_sec, whole.baseline_sec) == (2.0, 1.0, 1.5)
    row = PromptRow(0, "r", (1, 2), seed=3)
    (record,) = records_of(JOB, [row], [whole], {}, 10)
    token_table([record])  # it refuses what contradicts itself
    assert record.cost_usd == pytest.approx(420 * 10 / 3.6e16)


def test_no_field_of_what_goes_on_is_forgotten() -> None:
    """A new field of completions must be joined, or be listed here."""
    of_the_first = {"request_id", "error", "reused_from", "retry"}
    apart = {field.name for field in fields(Completion)} - of_the_first
    one, other = FIRST, FURTHER
    whole = joined(one, other)
    in_shadow = {"shadow_proposed", "shadow_accepted", "shadow_pair"}
    for name in apart - {"top_logprobs", "recheck"} - in_shadow:
        assert getattr(whole, name) != getattr(one, name), name


def test_what_was_verified_again_is_counted_of_both_parts() -> None:
    one = replace(FIRST, recheck=Recheck(3, 1, 0.5), shadow_pair=ShadowPair(1, 2, 3))
    other = replace(FURTHER, recheck=Recheck(4, 1, 0.25), shadow_pair=ShadowPair(1, 1, 1))
    whole = joined(one, other)
    assert whole.recheck == Recheck(7, 2, 0.5)
    assert whole.shadow_pair == ShadowPair(2, 3, 4)
    assert charged_with(one, [other]).recheck == Recheck(7, 2, 0.5)


def test_log_probabilities_of_the_likeliest_follow_one_another_too() -> None:
    tops = (((1,), (-0.5,)),) * 3
    one, other = (completion([PLAIN] * 3, (), top_logprobs=tops) for _ in range(2))
    assert joined(one, other).top_logprobs == tops * 2


def test_what_could_not_go_on_is_paid_for_and_changes_nothing() -> None:
    failed = completion([], (), finish_reason=FinishReason.ERROR, error="no room")
    left = joined(FIRST, failed)
    assert (left.token_ids, left.provenance) == (FIRST.token_ids, FIRST.provenance)
    assert (left.finish_reason, left.error) == (FinishReason.LENGTH, None)
    assert left.ticks == FIRST.ticks + Ticks(overhead=failed.ticks.total)


def test_time_of_tokens_that_are_not_used_is_overhead() -> None:
    charged = charged_with(FIRST, [FURTHER, FURTHER])
    assert charged.ticks == Ticks(prefill=10, verify=200, overhead=420)
    assert charged.compute_sec == 3.0
    assert charged_with(FIRST, []) == FIRST


def test_a_record_has_the_seed_of_the_retry_that_it_is() -> None:
    rows = [PromptRow(0, "r", (1, 2), seed=3, n=2)]
    done = [
        completion([PLAIN], (), request_id="job/0/1", retry=number, provenance=passes(1, (), ()))
        for number in (0, 1, 2)
    ]
    seeds = [record.seed for record in records_of(JOB, rows, done, {}, 0)]
    assert seeds == [retry_seed(sample_seed(3, 1), number) for number in (0, 1, 2)]


def test_only_what_is_kept_is_counted() -> None:
    request = Request("job/0/0", (1,), SamplingParams(), 0)
    outcomes = {
        "job/0/0": Outcome(FIRST, request, continued=True, retried=False, has_form=True),
        "job/1/0": Outcome(FIRST, request, continued=True, retried=True, has_form=False),
    }
    assert mending_report(outcomes, [FIRST]) == {"malformed_continued": 1, "malformed_mended": 1}
    assert mending_report({}, [FIRST]) == {}
    assert Mended([FIRST]).outcomes == {}


def test_requests_beside_a_sample_are_none_of_its_own() -> None:
    assert is_own("job/0/0")
    assert not is_own("job/0/0/mend/1")
    assert not is_own("job/0/0/judge")
