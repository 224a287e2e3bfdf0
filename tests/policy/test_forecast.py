"""What a job will cost, by earlier ones."""

from __future__ import annotations

from dataclasses import replace

from specbatch.pipeline.policy.costs.forecast import PastJob, Range, ends_at, forecast

NIGHT = PastJob(
    prefill_usd=0.01,
    other_usd=0.10,
    prompt_tokens=10_000,
    completion_tokens=5_000,
    completions=100,
    seconds=200.0,
)


def test_nothing_is_foretold_without_history() -> None:
    assert forecast([], 1, 1, 1) is None
    assert forecast([replace(NIGHT, completion_tokens=0)], 1, 1, 1) is None


def test_the_same_job_again_costs_the_same() -> None:
    found = forecast([NIGHT], 10_000, 100, 12_800)
    assert found is not None
    assert found.usd == Range(0.11, 0.11, 0.11)
    assert found.completion_tokens == Range(5_000, 5_000, 5_000)
    assert found.usd_per_1k_prompt.middle == 0.001
    assert found.usd_per_1k_completion.middle == 0.02
    assert found.sec.middle == 200.0


def test_prompts_and_completions_count_by_themselves() -> None:
    longer_prompts = forecast([NIGHT], 20_000, 100, 12_800)
    more_completions = forecast([NIGHT], 10_000, 200, 25_600)
    assert longer_prompts is not None
    assert more_completions is not None
    assert round(longer_prompts.usd.middle, 9) == 0.12
    assert round(more_completions.usd.middle, 9) == 0.21


def test_no_more_tokens_are_expected_than_the_job_allows() -> None:
    found = forecast([NIGHT], 0, 100, 1_000)
    assert found is not None
    assert found.completion_tokens.high == 1_000


def test_several_nights_give_a_range() -> None:
    dear = replace(NIGHT, other_usd=0.3)
    found = forecast([dear, NIGHT, replace(NIGHT, other_usd=0.2)], 10_000, 100, 12_800)
    assert found is not None
    assert (found.jobs, round(found.usd.middle, 9)) == (3, 0.21)
    assert (round(found.usd.low, 9), round(found.usd.high, 9)) == (0.11, 0.31)
    two = forecast([dear, NIGHT], 10_000, 100, 12_800)
    assert two is not None
    assert round(two.usd.middle, 9) == 0.21


# --- its end ------------------------------------------------------------------------------------
def test_a_job_ends_as_its_speed_says_and_before_its_first_row_as_it_did_last_time() -> None:
    assert ends_at(130.0, 100.0, 25, 100, usual_sec=1.0) == 220.0
    assert ends_at(130.0, 100.0, 100, 100, usual_sec=None) == 130.0
    assert ends_at(130.0, 100.0, 0, 100, usual_sec=50.0) == 180.0
    assert ends_at(130.0, 100.0, 0, 100, usual_sec=None) is None, "nobody knows"
    assert ends_at(130.0, 100.0, 25, 0, usual_sec=50.0) is None, "nor how many rows there are"
