"""Money saved against depth 0: no bias where steps waver, and an interval as sure as it says."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from policy.sham import Noise, covered, lognormal, sham_job, slow, spells, wandering

from specbatch.pipeline.policy.costs.controls import (
    MOST_JOBS,
    NOTHING_MEASURED,
    Arm,
    Controls,
    Measured,
    Part,
    weight,
)
from specbatch.pipeline.policy.costs.savings import (
    at_depth_0,
    drafted,
    half_width,
    pooled,
    savings,
    t95,
)
from specbatch.schemas.job_figures import Savings

NOISES = {
    "5 % slow": slow(0.05),
    "30 % slow": slow(0.3),
    "lognormal": lognormal(0.5),
    "spells": spells,
    "wandering": wandering,
}
RARELY = {"5 % slow", "lognormal", "spells"}  # of 200 jobs each, in the tier `long`
DOLLAR = 3_600_000_000  # microusd an hour: a second is a dollar


def measured(*steps: tuple[Arm, float, int], odds: float = 9.0, price: float = 1.0) -> Measured:
    """Of steps of ten sequences: what they are, their seconds, and the tokens they decided."""
    controls = Controls()
    for arm, seconds, tokens in steps:
        controls.step(arm, odds, price, 0.0, {"job": Part(seconds, tokens, 10)})
    return controls.take("job").priced(DOLLAR)


def saved(of: Measured, **report: Any) -> Savings:
    found = savings({"proposed": 1, "tokens": of.tokens} | report | of.report())
    assert found is not None
    return found


# --- sham jobs ----------------------------------------------------------------------------------
@pytest.mark.pipeline  # a million simulated steps
@pytest.mark.parametrize(
    "noise",
    [
        pytest.param(noise, id=name, marks=pytest.mark.long if name in RARELY else ())
        for name, noise in NOISES.items()
    ],
)
def test_of_200_sham_jobs_95_in_100_intervals_hold_nothing_saved(noise: Noise) -> None:
    inside, half = covered(noise, jobs=200, steps=3000, every=5)
    assert 0.92 <= inside / 200 <= 0.98
    assert half <= 0.05


@pytest.mark.parametrize("every", [lambda _: 8, lambda step: 4 + step // 100], ids=["even", "less"])
def test_what_jobs_save_is_right_on_average_where_many_steps_are_slow(every: Any) -> None:
    """The policy's own price is far below what steps take then, and so it must not be charged."""
    truth = 1.0 + 0.4 * sum(1.0 - 1.0 / every(step) for step in range(2000)) / 2000
    found = [sham_job(slow(0.3), seed, 2000, every, speedup=1.4) for seed in range(60)]
    mean = sum(one.speedup for one in found if one is not None) / 60
    assert mean == pytest.approx(truth, abs=0.02)


# --- by hand ------------------------------------------------------------------------------------
def test_a_job_for_which_nothing_was_drafted_saved_nothing_and_lost_nothing() -> None:
    rested = measured((Arm.PLAIN, 1.0, 10), (Arm.PLAIN, 3.0, 10))
    assert rested.plain_baseline == rested.plain_taken == 4.0
    assert savings({"proposed": 0, "tokens": 20} | rested.report()) is None
    assert not drafted({"proposed": 0, "tokens": 20})
    assert drafted({}, proposed=3), "what the store says of a job of an earlier version"


def test_what_rests_is_its_own_baseline() -> None:
    found = saved(measured((Arm.PLAIN, 1.0, 10), (Arm.PLAIN, 3.0, 10)))
    assert (found.usd, found.low_usd, found.high_usd, found.speedup) == (0.0, 0.0, 0.0, 1.0)


def test_drafts_without_a_control_step_are_not_measured() -> None:
    of = measured((Arm.DRAFTS, 1.0, 20), (Arm.PLAIN, 1.0, 10))
    assert savings({"proposed": 9, "tokens": 30} | of.report()) is None
    assert savings({"proposed": 9, "tokens": 30}) is None


def test_the_price_of_a_token_is_what_control_steps_took() -> None:
    """Whatever the policy thought it was: that only says how sizes compare."""
    steps = ((Arm.CONTROL, 2.0, 10), (Arm.DRAFTS, 3.0, 20), (Arm.DRAFTS, 3.0, 30))
    for price in (0.1, 1.0, 7.0):
        found = saved(measured(*steps, price=price))
        assert found.usd == pytest.approx((2 + 3) * 2.0 - 6.0)
        assert (found.low_usd, found.high_usd, found.controls) == (None, None, 1)
        assert found.taken_usd == pytest.approx(8.0)
        assert found.speedup == pytest.approx(12.0 / 8.0)


def test_a_slow_control_step_counts_in_full() -> None:
    fast, slow_one = (Arm.CONTROL, 1.0, 10), (Arm.CONTROL, 9.0, 10)
    of = measured(*[fast] * 3, slow_one, *[(Arm.DRAFTS, 1.0, 10)] * 36)
    assert at_depth_0(of) == pytest.approx(12.0 + 36 * 3.0)


def test_rare_controls_stand_for_more_steps() -> None:
    controls = Controls()
    for odds, seconds in ((3.0, 1.0), (12.0, 2.0)):
        controls.step(Arm.CONTROL, odds, 1.0, 0.0, {"job": Part(seconds, 10, 10)})
        for _ in range(int(odds)):
            controls.step(Arm.DRAFTS, odds, 1.0, 0.0, {"job": Part(seconds, 10, 10)})
    of = controls.take("job")
    assert at_depth_0(of) - of.plain_taken == pytest.approx(3 * 1.0 + 12 * 2.0)


def test_the_interval_is_that_of_the_ratio_estimator() -> None:
    """By hand: level 2, departures ±1 times odds of 9, two steps to price, t of one degree."""
    steps = ((Arm.CONTROL, 1.0, 10), (Arm.CONTROL, 3.0, 10))
    of = measured(*steps, (Arm.DRAFTS, 1.0, 10), (Arm.DRAFTS, 1.0, 10))
    departed = 2 * 2 * 9.0**2  # n / (n - 1) times their squares
    variance = departed * (2.0 / 18.0) ** 2 + departed * 2.0 / (2 * 9.0**2)
    assert half_width(of) == pytest.approx(12.706 * variance**0.5)
    found = saved(of)
    assert found.high_usd is not None
    assert found.high_usd - found.usd == pytest.approx(12.706 * variance**0.5)


def test_of_what_was_drafted_ahead_measured_steps_bear_their_tokens_part() -> None:
    of = measured((Arm.CONTROL, 1.0, 10), (Arm.DRAFTS, 1.0, 40))
    without = saved(of, tokens=200)
    found = saved(of, tokens=200, ahead_taken=8.0, ahead_usd=8.0)
    assert without.usd - found.usd == pytest.approx(8.0 * 50 / 200)
    assert found.taken_usd - without.taken_usd == pytest.approx(8.0 * 50 / 200)


def test_what_was_drafted_ahead_for_nothing_is_lost() -> None:
    """Drafts did not pay, so none was verified; but they had been written."""
    rested = measured((Arm.PLAIN, 4.0, 40))
    report = {"proposed": 0, "tokens": 80, "ahead_taken": 2.0, "ahead_usd": 2.0}
    found = savings(report | rested.report())
    assert found is not None
    assert found.usd == pytest.approx(-1.0)
    assert found.high_usd == pytest.approx(-1.0), "there is nothing to doubt"


def test_what_was_drafted_in_shadow_is_lost() -> None:
    controls = Controls()
    controls.step(Arm.PLAIN, 0.0, 1.0, 0.25, {"job": Part(4.0, 10, 10)})
    of = controls.take("job").priced(DOLLAR)
    found = savings({"proposed": 0, "shadow_proposed": 5, "tokens": 10} | of.report())
    assert found is not None
    assert found.usd == pytest.approx(-1.0)


def test_a_device_without_a_price_saves_time_and_no_money() -> None:
    steps = [(Arm.CONTROL, 2.0, 10), (Arm.CONTROL, 2.0, 10), (Arm.DRAFTS, 2.0, 20)]
    controls = Controls()
    for arm, seconds, tokens in steps:
        controls.step(arm, 9.0, 1.0, 0.0, {"job": Part(seconds, tokens, 10)})
    found = saved(controls.take("job").priced(0))
    assert (found.usd, found.taken_usd, found.high_usd) == (0.0, 0.0, 0.0)
    assert found.speedup == pytest.approx(8.0 / 6.0)


# --- sums ---------------------------------------------------------------------------------------
def test_sums_add_up_and_go_through_a_report() -> None:
    steps = [(Arm.CONTROL, 1.5, 10), (Arm.DRAFTS, 1.0, 20), (Arm.PLAIN, 2.0, 10)] * 3
    parts = [measured(*steps[:2]), measured(*steps[2:7]), measured(*steps[7:])]
    whole = sum(parts, NOTHING_MEASURED)
    assert whole == pytest.approx(measured(*steps))
    assert Measured.of_report(whole.report()) == whole
    assert NOTHING_MEASURED.report() == {}
    assert Measured.of_report({"compute_sec": 1.0}) == NOTHING_MEASURED


def test_devices_count_by_what_they_cost() -> None:
    """A second of the dear one is worth three of the cheap one, in sums and in their squares."""
    of = measured((Arm.CONTROL, 1.0, 10), (Arm.CONTROL, 2.0, 10))
    cheap, dear = of.priced(1_000_000), of.priced(3_000_000)
    assert dear.control_taken == pytest.approx(3 * cheap.control_taken)
    assert dear.control_products == pytest.approx(9 * cheap.control_products)
    assert dear.control_steps == cheap.control_steps == 2
    assert dear.usd == pytest.approx(3 * cheap.usd)
    assert cheap.usd == pytest.approx(cheap.taken) == pytest.approx(of.taken / 3600)


def test_beside_devices_that_cost_something_free_ones_change_no_savings() -> None:
    paid = measured((Arm.CONTROL, 2.0, 10), (Arm.CONTROL, 2.1, 10), (Arm.DRAFTS, 2.0, 20))
    controls = Controls()
    controls.step(Arm.PLAIN, 0.0, 1.0, 0.0, {"job": Part(500.0, 10, 10)})
    free = controls.take("job").priced(0)
    alone = saved(paid)
    for found in (saved(paid + free), saved(paid, ahead_taken=30.0 * weight(0))):
        values = (found.usd, found.low_usd, found.high_usd, found.speedup)
        expected = (alone.usd, alone.low_usd, alone.high_usd, alone.speedup)
        assert values == pytest.approx(expected, rel=1e-3)


def test_each_job_of_a_step_has_its_part() -> None:
    controls = Controls()
    controls.step(Arm.CONTROL, 9.0, 4.0, 0.0, {"a": Part(3.0, 10, 10), "b": Part(1.0, 30, 30)})
    controls.step(Arm.DRAFTS, 9.0, 4.0, 0.0, {"a": Part(3.0, 30, 10), "b": Part(1.0, 30, 30)})
    a, b = controls.take("a"), controls.take("b")
    assert (a.control_taken, a.control_price) == (27.0, 9.0)
    assert (b.control_taken, b.control_price) == (9.0, 27.0)
    assert (a.drafting_price, b.drafting_price) == (3.0, 3.0)
    assert controls.take("a") == NOTHING_MEASURED, "it was taken"


def test_the_level_follows_the_machine() -> None:
    controls = Controls()
    assert controls.level == 1.0
    for seconds in (2.0, 3.0):
        for _ in range(5000):
            controls.step(Arm.CONTROL, 9.0, 1.0, 0.0, {"job": Part(seconds, 10, 10)})
    assert controls.level == pytest.approx(3.0, rel=0.02)


# --- jobs together ------------------------------------------------------------------------------
ONE = Savings(2.0, 1.0, 3.0, 10.0, 1.2, 5)


def test_jobs_one_after_the_other_err_independently() -> None:
    found = pooled([(ONE, (0.0, 1.0)), (ONE, (1.0, 2.0))])
    assert found is not None
    assert (found.usd, found.taken_usd, found.controls) == (4.0, 20.0, 10)
    assert found.speedup == pytest.approx(1.2)
    assert found.high_usd == pytest.approx(4.0 + 2**0.5)


def test_jobs_at_the_same_time_share_control_steps_and_their_error() -> None:
    found = pooled([(ONE, (0.0, 5.0)), (ONE, (4.0, 9.0)), (ONE, (9.0, 10.0))])
    assert found is not None
    assert found.low_usd == pytest.approx(6.0 - 5**0.5)


def test_one_job_without_an_interval_leaves_none_to_the_others() -> None:
    found = pooled([(ONE, (0.0, 1.0)), (replace(ONE, low_usd=None, high_usd=None), (1.0, 2.0))])
    assert found is not None
    assert (found.usd, found.low_usd, found.high_usd) == (4.0, None, None)
    assert pooled([]) is None


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.706), (30, 2.042), (31, 2.0395), (120, 1.9799)]
)
def test_students_t_by_its_tables(degrees: int, expected: float) -> None:
    assert t95(degrees) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("degrees", [*range(1, 41), 120])
def test_students_t_by_its_density(degrees: int) -> None:
    """Between its points and their negatives lie 95 % of the density: Simpson's rule."""
    norm = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2) / math.sqrt(degrees * math.pi)
    x = np.linspace(-t95(degrees), t95(degrees), 20_001)
    density = norm * (1.0 + x * x / degrees) ** (-(degrees + 1) / 2)
    inside = (density[:-2:2] + 4.0 * density[1::2] + density[2::2]).sum() * (x[1] - x[0]) / 3.0
    assert inside == pytest.approx(0.95, abs=6e-5)


@pytest.mark.parametrize("odds", [9.0, 0.9])
def test_controls_of_unlike_odds_are_worth_fewer_of_one_weight(odds: float) -> None:
    """The second stands for fewer steps: so many of one weight would waver as much."""
    controls = Controls()
    for one, seconds in ((9.0, 1.0), (odds, 3.0)):
        controls.step(Arm.CONTROL, one, 1.0, 0.0, {"job": Part(seconds, 10, 10)})
    controls.step(Arm.DRAFTS, 9.0, 1.0, 0.0, {"job": Part(1.0, 10, 10)})
    of = controls.take("job")
    level, squares = of.control_taken / of.control_price, 9.0**2 + odds**2
    off = (9.0 * (1.0 - level)) ** 2 + (odds * (3.0 - level)) ** 2
    alike = (9.0 + odds) ** 2 / squares
    variance = off * alike / (alike - 1.0) * (1.0 / (9.0 + odds) ** 2 + 1.0 / squares)
    assert half_width(of) == pytest.approx(12.706 * variance**0.5)


def test_without_a_report_of_drafts_nothing_was_drafted() -> None:
    assert not drafted({})
    assert not drafted({"proposed": 0, "ahead_taken": 0.0})
    assert drafted({}, proposed=1)
    assert drafted({"ahead_taken": 0.1})


# --- sums of steps ------------------------------------------------------------------------------
def test_of_nothing_measured_nothing_is_added() -> None:
    of = measured((Arm.CONTROL, 1.0, 10), (Arm.DRAFTS, 2.0, 30), (Arm.PLAIN, 1.0, 10))
    assert Measured() + of == of + NOTHING_MEASURED == of
    assert (Measured().taken, Measured().tokens) == (0.0, 0.0)


def test_steps_that_settle_are_the_drafts_and_steps_asked_for_are_nobodys() -> None:
    settling = measured((Arm.SETTLING, 2.0, 10), (Arm.DRAFTS, 3.0, 40), price=0.5)
    assert settling == measured((Arm.DRAFTS, 2.0, 10), (Arm.DRAFTS, 3.0, 40), price=0.5)
    assert settling.drafting_steps == 2
    assert settling.drafting_price == pytest.approx(0.5 * 5)
    assert settling.drafting_price_squares == pytest.approx(0.5**2 + 2.0**2)


def test_a_control_counts_without_what_was_drafted_in_shadow_beside_it() -> None:
    controls = Controls()
    controls.step(Arm.CONTROL, 9.0, 1.0, 0.25, {"job": Part(4.0, 10, 10)})
    of = controls.take("job")
    assert (of.control_taken, of.plain_taken, of.plain_baseline) == (27.0, 4.0, 3.0)
    assert controls.level == 3.0


def test_the_level_is_that_of_late_controls() -> None:
    """A thousand count, whatever there was before them."""
    controls = Controls()
    for seconds, steps in ((50.0, 20_000), (2.0, 400), (4.0, 400)):
        for _ in range(steps):
            controls.step(Arm.CONTROL, 9.0, 1.0, 0.0, {"job": Part(seconds, 10, 10)})
        if seconds == 50.0:
            assert controls.level == pytest.approx(50.0)
    assert 3.0 < controls.level < 45.0, "old ones still count"
    for _ in range(4000):
        controls.step(Arm.CONTROL, 9.0, 1.0, 0.0, {"job": Part(3.0, 10, 10)})
    assert controls.level == pytest.approx(3.0, rel=0.2), "and count less and less"


def test_of_many_jobs_those_met_first_make_room() -> None:
    controls = Controls()
    for number in range(MOST_JOBS + 1):
        controls.step(Arm.PLAIN, 0.0, 1.0, 0.0, {f"job-{number}": Part(1.0, 1, 1)})
    assert controls.take("job-0") == NOTHING_MEASURED
    assert controls.take("job-1").plain_taken == 1.0
    assert controls.take(f"job-{MOST_JOBS}").plain_taken == 1.0


def test_the_interval_lies_around_what_was_saved() -> None:
    steps = ((Arm.CONTROL, 1.0, 10), (Arm.CONTROL, 1.2, 10), (Arm.DRAFTS, 1.0, 30))
    found = saved(measured(*steps))
    assert found.low_usd is not None
    assert found.high_usd is not None
    assert found.low_usd < found.usd < found.high_usd
    assert found.usd - found.low_usd == pytest.approx(found.high_usd - found.usd)


def test_jobs_without_any_cost_save_nothing_and_keep_their_ratio() -> None:
    free = Savings(0.0, 0.0, 0.0, 0.0, 1.3, 4)
    found = pooled([(free, (0.0, 1.0)), (free, (2.0, 3.0))])
    assert found == Savings(0.0, 0.0, 0.0, 0.0, 1.3, 8)


def test_a_control_of_several_passes_counts_as_one_pass_of_its_mean_length() -> None:
    sums = []
    for passes in (1, 4):
        controls = Controls()
        part = Part(2.0 * passes, 10 * passes, 10)
        controls.step(Arm.CONTROL, 9.0, 1.0, 0.25, {"job": part})
        controls.step(Arm.DRAFTS, 9.0, 1.0, 0.0, {"job": Part(3.0, 20, 10)})
        assert controls.level == 1.5
        sums.append(controls.take("job"))
    assert sums[0].control_taken == sums[1].control_taken == 9.0 * 2.0 * 0.75
    assert sums[0].control_price == sums[1].control_price
    assert (sums[1].plain_taken, sums[1].plain_tokens) == (8.0, 40)
