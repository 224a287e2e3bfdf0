"""A slow fall of acceptance is told in time, and a stable job's nights are no fall."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest

from specbatch.benchmarks.slow_falls import (
    BAR_FALSE,
    BAR_NIGHTS,
    Job,
    false_flags,
    flags,
    nights,
    nights_to_flag,
)
from specbatch.pipeline.policy.slow_fall import BLOCK_DAYS, BLOCKS, by_series, slow_fall
from specbatch.schemas.speculation import AcceptanceDay

NOISY = Job(tested=(200_000, 200_000), day_share=0.03, weekend=0.1)  # falsely flagged most often
SMALL = Job(tested=(2_000, 2_000), day_share=0.02, weekend=0.1)  # found late
BEFORE = 60  # days


def told(job: Job, days: int, level: Callable[[int], float], seed: int = 0) -> list[int]:
    """Days at which the flag is up."""
    return [day for day, fell in flags(list(nights(job, days, str(seed), level))) if fell]


def plain(*rates: float, tested: float = 10_000.0) -> list[AcceptanceDay]:
    return [AcceptanceDay("block", None, i, rate * tested, tested) for i, rate in enumerate(rates)]


@pytest.mark.parametrize("job", [NOISY, SMALL], ids=["noisy", "small"])
def test_a_stable_year_has_hardly_a_false_flag(job: Job) -> None:
    assert statistics.fmean(false_flags(job, seed) for seed in range(10)) <= BAR_FALSE


@pytest.mark.parametrize("job", [NOISY, SMALL], ids=["noisy", "small"])
def test_a_fall_of_one_percent_a_day_is_told_within_three_weeks(job: Job) -> None:
    found = [nights_to_flag(job, seed) for seed in range(20)]
    assert all(night is not None and night <= BAR_NIGHTS for night in found)


def test_a_flag_ends_once_acceptance_is_back() -> None:
    fallen = range(BEFORE, BEFORE + 21)
    days = told(Job(), 150, lambda day: 0.8 if day in fallen else 1.0)
    assert days[0] in fallen
    assert fallen[-1] <= days[-1] < fallen[-1] + 10


def test_a_level_that_stays_becomes_the_baseline() -> None:
    days = told(Job(), 250, lambda day: 0.8 if day >= BEFORE else 1.0)
    assert BEFORE + 2 <= days[0] < BEFORE + 10, "one night is no fall, some are"
    assert days[-1] < BEFORE + (BLOCKS + 1) * BLOCK_DAYS + 7


def test_a_better_proposer_raises_the_baseline() -> None:
    def level(day: int) -> float:
        return 1.0 if day < BEFORE else 1.25 * 0.99 ** max(0, day - 2 * BEFORE)

    assert told(Job(), 2 * BEFORE, level) == []
    days = told(Job(), 2 * BEFORE + BAR_NIGHTS, level)
    assert days, "it is still above what it was before it was improved"


def test_what_an_operator_accepted_is_no_fall() -> None:
    days = list(nights(Job(), BEFORE + 40, "0", lambda day: 0.8 if day >= BEFORE else 1.0))
    found = slow_fall(days)
    assert found is not None
    assert found.falls
    assert found.reference == pytest.approx(0.7, rel=0.05)
    accepted = [replace(day, superseded=day.day < BEFORE) for day in days]
    found = slow_fall(accepted)
    assert found is not None
    assert not found.falls
    assert found.reference == pytest.approx(0.56, rel=0.05)


@pytest.mark.parametrize(
    "days",
    [
        [],
        plain(*[0.7] * 30),  # no block of nights before the newest three weeks
        plain(*[0.7] * 60, tested=100.0),  # too little in each
        plain(*[0.0] * 60),  # nothing that could fall
    ],
    ids=["nothing", "too new", "too little", "never right"],
)
def test_without_a_baseline_nothing_is_told(days: list[AcceptanceDay]) -> None:
    assert slow_fall(days) is None


def test_nights_all_alike_have_a_deviation_still() -> None:
    found = slow_fall(plain(*[1.0] * 60))
    assert found is not None
    assert (found.reference, found.score) == (1.0, 0.0)
    found = slow_fall(plain(*[1.0] * 60, *[0.98] * 15))
    assert found is not None
    assert not found.falls, "a difference that nobody would miss"


def test_one_broken_night_is_no_slow_fall() -> None:
    found = slow_fall(plain(*[0.7] * 60, 0.0, 0.0))
    assert found is not None
    assert found.score > 0.0
    assert not found.falls


def test_nights_of_long_ago_say_nothing_of_a_job_that_hardly_drafts_any_more() -> None:
    falling = [*[0.8] * 60, *[0.8 * 0.97**n for n in range(21)]]
    found = slow_fall(plain(*falling))
    assert found is not None
    assert found.falls
    quiet = [replace(day, day=day.day + len(falling)) for day in plain(*[0.4] * 9, tested=100.0)]
    assert slow_fall([*plain(*falling), *quiet]) is None


def test_a_worse_model_under_the_same_name_is_a_fall_like_any_other() -> None:
    old = [replace(day, fingerprint="old") for day in plain(*[0.8] * 60)]
    new = [replace(day, day=day.day + 60, fingerprint="new") for day in plain(*[0.6] * 20)]
    (days,) = by_series([*new, *old]).values()
    found = slow_fall(days)
    assert found is not None
    assert found.falls
