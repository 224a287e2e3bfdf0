"""A sequence's own record counts as much as sequences differ."""

from __future__ import annotations

import random

import pytest

from specbatch.pipeline.policy.acceptance import Own, Record, Spread
from specbatch.pipeline.policy.tuning import LEAST_SEQUENCE_WEIGHT, RECORD_TESTS, SEQUENCE_WEIGHT


def record(rate: float, expected: float, generator: random.Random) -> Record:
    agreed = sum(generator.random() < rate for _ in range(RECORD_TESTS))
    return Record.of(agreed, RECORD_TESTS, expected)


def taught(rates: list[float], sequences: int = 40, seed: int = 3) -> Spread:
    """A spread after so many sequences of these rates, each as often as the others."""
    generator = random.Random(seed)
    spread, mean = Spread(), sum(rates) / len(rates)
    for sequence in range(sequences):
        rate = rates[sequence % len(rates)]
        spread.add(record(rate, mean, generator), record(rate, mean, generator))
    return spread


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("seed", range(5))
def test_where_sequences_are_alike_all_of_them_are_believed(rate: float, seed: int) -> None:
    assert taught([rate], sequences=96, seed=seed).weight > 60


@pytest.mark.parametrize("seed", range(5))
def test_passages_that_take_turns_within_a_text_tell_nothing_of_what_comes(seed: int) -> None:
    """Records differ by far more than chance makes them, and none follows its last one."""
    generator = random.Random(seed)
    spread = Spread()
    for _ in range(96):
        one, two = (record(generator.choice([0.5, 0.9]), 0.7, generator) for _ in range(2))
        spread.add(one, two)
    assert spread.weight > 60


@pytest.mark.parametrize("seed", range(5))
def test_what_all_have_in_common_is_no_difference_among_them(seed: int) -> None:
    generator = random.Random(seed)
    spread = Spread()
    for _ in range(96):  # the rate of all lags behind
        spread.add(record(0.8, 0.6, generator), record(0.8, 0.6, generator))
    assert spread.weight > 60


@pytest.mark.parametrize("seed", range(5))
def test_jobs_of_other_acceptances_do_not_make_sequences_look_unlike(seed: int) -> None:
    generator = random.Random(seed)
    spread = Spread()
    for rate in (0.3, 0.5, 0.7, 0.9):  # the last job's records are a third of all
        for _ in range(20 if rate < 0.9 else 32):
            spread.add(record(rate, rate, generator), record(rate, rate, generator))
    assert spread.weight > 60


def test_where_they_differ_their_own_record_is() -> None:
    assert LEAST_SEQUENCE_WEIGHT <= taught([0.1, 0.5, 0.9]).weight < 4


def test_the_more_they_differ_the_less_the_others_count() -> None:
    weights = [taught([0.6 - d, 0.6 + d], sequences=96).weight for d in (0.05, 0.15, 0.3)]
    assert weights == sorted(weights, reverse=True)
    assert weights[0] > 3 * weights[-1]


def test_little_evidence_changes_nothing() -> None:
    assert taught([0.1, 0.9], sequences=8).weight == SEQUENCE_WEIGHT
    spread, short = Spread(), Record.of(3, 3, 0.5)
    for _ in range(100):
        spread.add(short, short)  # too short to say anything
    assert spread.weight == SEQUENCE_WEIGHT


def test_a_sequence_that_differs_is_known_for_it() -> None:
    alike, mixed = taught([0.5]), taught([0.1, 0.9])
    own = Own()
    for _ in range(10):
        own.observe(4, 4)
    assert own.rate(0.5, alike) < 0.65
    assert own.rate(0.5, mixed) > 0.9


def test_a_record_counts_deviations_of_chance() -> None:
    assert Record.of(24, 32, 0.5) == Record(8 / (32 * 0.5 * 0.5) ** 0.5, 32)
    assert Record.of(24, 32, 0.9).away == pytest.approx(-4.8 / (32 * 0.9 * 0.1) ** 0.5)


def test_a_record_is_closed_when_it_is_long_enough() -> None:
    own = Own()
    assert [own.observe(1, 1) for _ in range(RECORD_TESTS)] == [False] * (RECORD_TESTS - 1) + [True]
    own.close(0.5, Spread())
    assert (own.agreed, own.tested) == (0, 0)
    assert own.last == Record.of(RECORD_TESTS, RECORD_TESTS, 0.5)
