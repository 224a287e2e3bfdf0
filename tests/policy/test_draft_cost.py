"""What a draft model's call costs: the fit of all calls, older ones fading, pulled to a guess."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from specbatch.pipeline.policy.step_cost import LinearCost
from specbatch.pipeline.policy.tuning import DRAFT_READ_AT_ONCE, DRAFT_TRUST_AFTER

GUESS = [1e-4, 5e-5, 1e-6]


def calls(count: int, seed: int = 0) -> list[tuple[tuple[float, ...], float]]:
    """Sizes of calls, and what they took on a machine that wavers."""
    generator, found = random.Random(seed), []
    for _ in range(count):
        sizes = (1.0, float(generator.randint(1, 8)), float(generator.randint(1, 64)))
        seconds = sum(a * b for a, b in zip(sizes, (3e-4, 2e-4, 1e-5), strict=True))
        found.append((sizes, seconds * generator.uniform(0.8, 1.2)))
    return found


@pytest.mark.parametrize("count", [1, 3, 15, 16, 17, 31, 32, 100])
@pytest.mark.parametrize("seed", range(4))
def test_whenever_calls_are_read_the_fit_is_the_one_of_reading_each_at_once(
    count: int, seed: int
) -> None:
    cost, eager = LinearCost(GUESS), LinearCost(GUESS)
    for sizes, seconds in calls(count, seed):
        cost.observe(sizes, seconds)
        eager.observe(sizes, seconds)
        eager.solve()
    cost.solve()
    assert cost.weights == pytest.approx(eager.weights)
    cost.solve()
    assert cost.weights == pytest.approx(eager.weights), "nothing was new"


@pytest.mark.parametrize("seed", range(4))
def test_the_fit_is_that_of_relative_errors_with_older_calls_fading(seed: int) -> None:
    cost, observed = LinearCost(GUESS, forgetting=0.9), calls(60, seed)
    for sizes, seconds in observed:
        cost.observe(sizes, seconds)
    cost.solve()
    ages = np.arange(len(observed), 0.0, -1.0)
    scale = np.array([0.9**age for age in ages]) ** 0.5
    rows = np.array([np.array(sizes) / seconds for sizes, seconds in observed])
    best, *_ = np.linalg.lstsq(rows * scale[:, None], scale, rcond=None)
    assert (best > 0).all(), "else the fit may be another"
    assert cost.weights == pytest.approx(best.tolist(), rel=0.05)


def test_calls_are_read_at_once_while_few_are_known_and_later_some_together() -> None:
    cost, changes = LinearCost(GUESS), []
    for sizes, seconds in calls(DRAFT_TRUST_AFTER + 2 * DRAFT_READ_AT_ONCE):
        before = cost.weights
        cost.observe(sizes, seconds)
        changes.append(cost.weights != before)
    together = [False] * (DRAFT_READ_AT_ONCE - 1) + [True]
    assert changes == [True] * DRAFT_TRUST_AFTER + 2 * together


def test_what_one_call_does_not_tell_is_taken_from_the_guess() -> None:
    cost = LinearCost(GUESS)
    cost.observe((1.0, 4.0, 10.0), cost.predict((1.0, 4.0, 10.0)))
    assert cost.weights == pytest.approx(GUESS)


def test_a_size_that_no_call_had_costs_nothing_and_breaks_nothing() -> None:
    cost = LinearCost(GUESS)
    for _ in range(20):
        cost.observe((1.0, 0.0, 8.0), 1e-3)
    assert cost.weights[1] == 0.0
    assert cost.predict((1.0, 0.0, 8.0)) == pytest.approx(1e-3, rel=0.01)


def test_a_size_that_seems_to_make_calls_shorter_costs_nothing() -> None:
    cost = LinearCost([1e-3, 1e-5])
    for size in range(1, 60):
        cost.observe((1.0, float(size)), 2e-3 - 1e-5 * size)
    assert cost.weights[1] == 0.0
    assert 1.4e-3 < cost.weights[0] < 2e-3


def test_a_clock_that_did_not_move_breaks_nothing() -> None:
    cost = LinearCost(GUESS)
    for seconds in (0.0, 1e-3, 1e-3):
        cost.observe((1.0, 1.0, 1.0), seconds)
    assert np.isfinite(cost.weights).all()


def test_calls_are_believed_whole_until_enough_are_known() -> None:
    cost = LinearCost(GUESS)
    for _ in range(DRAFT_TRUST_AFTER - 1):
        cost.observe((1.0, 1.0, 1.0), 1e-3)
    assert cost.observe((1.0, 1.0, 1.0), 9.0) == 9.0
    assert cost.observe((1.0, 1.0, 1.0), 90.0) < 90.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"weights": [1.0, 2.0]},
        {"moment": [1.0, 2.0, 3.0, 4.0]},
        {"gram": [[1.0, 0.0], [0.0, 1.0]]},
        {"guess": [1.0, float("nan"), 1.0]},
        {"weights": [1.0, 1.0, float("inf")]},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_state_of_other_sizes_or_without_numbers_is_refused(wrong: dict[str, Any]) -> None:
    cost, other = LinearCost(GUESS), LinearCost(GUESS)
    for sizes, seconds in calls(20):
        cost.observe(sizes, seconds)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        other.restore(cost.state() | wrong)
    assert other.weights == GUESS, "it is as it was"


def test_a_restored_cost_goes_on_as_the_one_that_was_kept() -> None:
    cost, again = LinearCost(GUESS), LinearCost([1.0, 1.0, 1.0])
    for sizes, seconds in calls(40):
        cost.observe(sizes, seconds)
    again.restore(json.loads(json.dumps(cost.state())))
    for sizes, seconds in calls(40, seed=1):
        assert again.observe(sizes, seconds) == cost.observe(sizes, seconds)
    assert again.state() == cost.state()
