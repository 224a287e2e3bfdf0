"""A sequence's own record counts as much as sequences differ."""

from __future__ import annotations

import random

import pytest

from specbatch.pipeline.policy.spread import (
    FIRST_WEIGHT,
    LEAST_WEIGHT,
    WINDOW_TESTS,
    Own,
    Spread,
)


def taught(rates: list[float], windows: int = 40, seed: int = 3) -> Spread:
    """A spread after so many windows of sequences of these rates, each as often as the others."""
    generator = random.Random(seed)
    spread, mean = Spread(), sum(rates) / len(rates)
    for window in range(windows):
        rate = rates[window % len(rates)]
        agreed = sum(generator.random() < rate for _ in range(WINDOW_TESTS))
        spread.add(agreed, WINDOW_TESTS, mean)
    return spread


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("seed", range(5))
def test_where_sequences_are_alike_all_of_them_are_believed(rate: float, seed: int) -> None:
    assert taught([rate], windows=96, seed=seed).weight > 60


@pytest.mark.parametrize("seed", range(5))
def test_jobs_of_other_acceptances_do_not_make_sequences_look_unlike(seed: int) -> None:
    generator = random.Random(seed)
    spread = Spread()
    for rate in (0.3, 0.5, 0.7, 0.9):  # the last job's records are a third of all
        for _ in range(20 if rate < 0.9 else 32):
            agreed = sum(generator.random() < rate for _ in range(WINDOW_TESTS))
            spread.add(agreed, WINDOW_TESTS, rate)
    assert spread.weight > 60


def test_where_they_differ_their_own_record_is() -> None:
    assert LEAST_WEIGHT <= taught([0.1, 0.5, 0.9]).weight < 4


def test_the_more_they_differ_the_less_the_others_count() -> None:
    weights = [taught([0.6 - d, 0.6 + d], windows=96).weight for d in (0.05, 0.15, 0.3)]
    assert weights == sorted(weights, reverse=True)
    assert weights[0] > 3 * weights[-1]


def test_little_evidence_changes_nothing() -> None:
    assert taught([0.1, 0.9], windows=8).weight == FIRST_WEIGHT
    spread = Spread()
    for _ in range(100):
        spread.add(3, 3, 0.5)  # too short to say anything
    assert spread.weight == FIRST_WEIGHT


def test_a_sequence_that_differs_is_known_for_it() -> None:
    alike, mixed = taught([0.5]), taught([0.1, 0.9])
    own = Own()
    for _ in range(10):
        own.observe(4, 4)
    assert own.rate(0.5, alike) < 0.65
    assert own.rate(0.5, mixed) > 0.9
