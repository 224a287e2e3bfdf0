"""A sequence's own record counts as much as sequences differ."""

from __future__ import annotations

import random

import pytest

from specbatch.pipeline.policy.acceptance import Own, Record, Spread
from specbatch.pipeline.policy.tuning import (
    ESTIMATE_EVERY_PAIRS,
    LEAST_RECORD_PAIRS,
    LEAST_RECORD_TESTS,
    LEAST_SEQUENCE_WEIGHT,
    MOST_SEQUENCE_WEIGHT,
    RECORD_TESTS,
    SEQUENCE_WEIGHT,
)


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


def pairs_of_slope(slope: float, count: int, scale: float = 1.0) -> list[tuple[Record, Record]]:
    """Every four of them have this slope exactly, around means of their own."""
    both, apart = scale * (1.0 + slope) ** 0.5, scale * (1.0 - slope) ** 0.5
    tested = (LEAST_RECORD_TESTS, 3 * LEAST_RECORD_TESTS)
    found = []
    for i in range(count):
        u, v = both * (-1) ** i, apart * (-1) ** (i // 2)
        found.append((Record(5.0 + u + v, tested[0]), Record(u - v - 2.0, tested[1])))
    return found


@pytest.mark.parametrize("slope", [0.1, 0.25, 0.5, 0.8])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_a_record_is_believed_as_far_as_the_next_one_follows_it(slope: float, scale: float) -> None:
    spread = Spread()
    for one, two in pairs_of_slope(slope, LEAST_RECORD_PAIRS, scale):
        assert spread.weight == SEQUENCE_WEIGHT, "so few say nothing"
        spread.add(one, two)
    tested = 2 * LEAST_RECORD_TESTS  # of a record, on average
    assert tested / (tested + spread.weight) == pytest.approx(slope)


@pytest.mark.parametrize("slope", [0.0, -0.5, 1e-3])
def test_records_that_do_not_follow_each_other_are_believed_least(slope: float) -> None:
    spread = Spread()
    for one, two in pairs_of_slope(slope, LEAST_RECORD_PAIRS):
        spread.add(one, two)
    assert spread.weight == MOST_SEQUENCE_WEIGHT


def test_an_estimate_waits_for_some_new_pairs() -> None:
    spread = Spread()
    for one, two in pairs_of_slope(0.5, LEAST_RECORD_PAIRS):
        spread.add(one, two)
    before, weights = spread.weight, []
    for one, two in pairs_of_slope(0.0, ESTIMATE_EVERY_PAIRS):
        spread.add(one, two)
        weights.append(spread.weight)
    assert weights[:-1] == [before] * (ESTIMATE_EVERY_PAIRS - 1)
    assert weights[-1] > before


def test_a_record_is_closed_after_as_many_tests_refused_ones_among_them() -> None:
    own = Own()
    assert [own.observe(8, 3) for _ in range(RECORD_TESTS // 4)][-2:] == [False, True]
    assert (own.agreed, own.tested) == (RECORD_TESTS * 3 // 4, RECORD_TESTS)


def test_sequences_teach_how_far_they_differ_as_their_records_close() -> None:
    spread = Spread()
    for sequence in range(40):
        own = Own()
        for _ in range(3):
            for _ in range(RECORD_TESTS):
                own.observe(1, sequence % 2)
            own.close(0.5, spread)
    assert spread.weight == LEAST_SEQUENCE_WEIGHT, "each is as it was"
