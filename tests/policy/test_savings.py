"""Money saved against depth 0: the estimate, and an interval that holds as often as it says."""

from __future__ import annotations

import random

import pytest

from specbatch.pipeline.policy.savings import savings, t95


def test_nothing_measured_says_nothing() -> None:
    assert savings([]) is None


def test_one_group_has_no_interval() -> None:
    found = savings([(2.0, 3.0)])
    assert found is not None
    assert (found.usd, found.low_usd, found.high_usd, found.speedup) == (1.0, None, None, 1.5)


def test_groups_of_one_mind_leave_no_doubt() -> None:
    found = savings([(2.0, 3.0), (4.0, 6.0), (1.0, 1.5)])
    assert found is not None
    assert (found.usd, found.low_usd, found.high_usd) == (3.5, 3.5, 3.5)


def test_a_job_that_drafting_made_dearer_has_lost_money() -> None:
    found = savings([(3.0, 2.0), (3.2, 2.1), (2.9, 2.2)])
    assert found is not None
    assert found.low_usd is not None
    assert found.high_usd is not None
    assert found.low_usd < found.usd < found.high_usd < 0


def test_the_interval_is_that_of_the_ratio_estimator() -> None:
    """By hand: R = 9/6, departures 0.5 and -0.5, t of one degree."""
    found = savings([(2.0, 3.5), (4.0, 5.5)])
    assert found is not None
    assert found.high_usd == pytest.approx(3.0 + 12.706 * (2 / 1 * 0.5) ** 0.5)


@pytest.mark.parametrize("groups", [5, 40])
def test_the_interval_holds_about_95_times_in_100(groups: int) -> None:
    draw, true_ratio, held = random.Random(groups), 1.3, 0
    for _ in range(1000):
        taken = [draw.uniform(0.5, 2.0) for _ in range(groups)]
        found = savings([(t, t * true_ratio + draw.gauss(0.0, 0.2)) for t in taken])
        assert found is not None
        assert found.low_usd is not None
        assert found.high_usd is not None
        held += found.low_usd <= (true_ratio - 1) * sum(taken) <= found.high_usd
    assert 930 <= held <= 975


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.706), (30, 2.042), (31, 2.0395), (120, 1.9799)]
)
def test_students_t(degrees: int, expected: float) -> None:
    assert t95(degrees) == pytest.approx(expected, abs=1e-4)
