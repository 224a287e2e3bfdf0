"""A slow fall of acceptance is told in time, and a stable job's nights are no fall."""

from __future__ import annotations

import random
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
from specbatch.pipeline.policy.slow_fall import (
    ALLOWANCE,
    BLOCK_DAYS,
    BLOCKS,
    CEILING,
    DESIGN,
    LEAST_DEVIATION,
    LEAST_NIGHTS,
    MOST_DEVIATIONS,
    MOST_SILENT,
    THRESHOLD,
    by_series,
    slow_fall,
)
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


# --- figures ------------------------------------------------------------------------------------
@pytest.mark.parametrize("below", [0.03, 0.05, 0.08, 0.3])
def test_each_night_adds_its_deviations_below_the_reference_less_an_allowance(below: float) -> None:
    before = BLOCKS * BLOCK_DAYS
    chance = DESIGN * 0.3 / (0.7 * 10_000)
    step = min(below / (LEAST_DEVIATION**2 + chance) ** 0.5, MOST_DEVIATIONS) - ALLOWANCE
    for fallen in range(1, 8):
        found = slow_fall(plain(*[0.7] * before, *[0.7 * (1.0 - below)] * fallen))
        assert found is not None
        assert found.reference == pytest.approx(0.7)
        assert found.score == pytest.approx(min(max(fallen * step, 0.0), CEILING))
        assert found.falls is (found.score > THRESHOLD)


def test_the_reference_is_the_best_block_without_its_tenth_at_either_end() -> None:
    generator = random.Random(4)
    blocks = [[generator.uniform(0.6, 0.7) for _ in range(BLOCK_DAYS)] for _ in range(BLOCKS)]
    blocks[1] = [rate + 0.1 for rate in blocks[1]]
    blocks[1][3], blocks[1][7], blocks[1][9] = 0.0, 1.0, 0.99
    found = slow_fall(plain(*(rate for block in blocks for rate in block), *[0.65] * BLOCK_DAYS))
    assert found is not None
    assert found.reference == pytest.approx(statistics.fmean(sorted(blocks[1])[2:-2]))
    assert (found.first_day, found.last_day) == (BLOCK_DAYS, 2 * BLOCK_DAYS - 1)


@pytest.mark.parametrize("deviation", [0.05, 0.1])
def test_how_far_nights_differ_is_found_in_them(deviation: float) -> None:
    found = []
    for seed in range(20):
        generator = random.Random(seed)
        rates = [0.5 * generator.gauss(1.0, deviation) for _ in range(5 * BLOCK_DAYS)]
        fall = slow_fall(plain(*rates, tested=1e6))
        assert fall is not None
        found.append(fall.deviation)
    assert statistics.fmean(found) == pytest.approx(deviation, rel=0.15)


def test_what_is_usual_on_a_weekday_is_no_fall() -> None:
    rates = [0.7 * (0.7 if day % 7 in (5, 6) else 1.0) for day in range(5 * BLOCK_DAYS)]
    found = slow_fall(plain(*rates))
    assert found is not None
    assert found.score < THRESHOLD / 2


@pytest.mark.parametrize("silent", [MOST_SILENT, MOST_SILENT + 1])
def test_after_a_week_of_too_few_tokens_nothing_is_known_of_today(silent: int) -> None:
    days = plain(*[0.8] * 60)
    quiet = [replace(day, day=day.day + 60) for day in plain(*[0.8] * silent, tested=100.0)]
    assert (slow_fall([*days, *quiet]) is None) is (silent > MOST_SILENT)


def test_a_block_of_too_few_nights_is_no_reference() -> None:
    for nights_before in (LEAST_NIGHTS - 1, LEAST_NIGHTS):
        days = plain(*[0.7] * (nights_before + BLOCK_DAYS))
        assert (slow_fall(days) is None) is (nights_before < LEAST_NIGHTS)


def test_two_models_on_one_day_count_together_under_the_busier_ones_name() -> None:
    day = AcceptanceDay("block", "news", 7, 30.0, 100.0, "old")
    other = replace(day, agreed=500.0, tested=600.0, fingerprint="new")
    apart = [replace(day, tag=None), replace(day, proposer="ngram"), replace(day, day=6)]
    series = by_series([day, *apart, other])
    assert [one.day for one in series["block", "news"]] == [6, 7]
    assert set(series) == {("block", "news"), ("block", None), ("ngram", "news")}
    both = series["block", "news"][1]
    assert (both.agreed, both.tested, both.fingerprint) == (530.0, 700.0, "new")
    for one, two, whole in ((True, True, True), (True, False, False), (False, True, False)):
        [of] = by_series([replace(day, superseded=one), replace(other, superseded=two)]).values()
        assert of[0].superseded is whole
