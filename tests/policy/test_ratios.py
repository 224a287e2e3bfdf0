"""Ratios of sums, and how sure they are."""

from __future__ import annotations

import math
import random

import pytest

from specbatch.pipeline.policy.ratios import Interval, influence, interval, interval_of, ratio


def test_by_hand() -> None:
    """The ratio is 2, and each term moves it by a half."""
    found = interval_of([(1.0, 1.0), (3.0, 1.0)])
    half = 1.96 * (2 * 0.5**2 * 2 / 1) ** 0.5
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0 - half, 2.0 + half))
    assert influence([(4.0, 1.0), (4.0, 3.0)]) == pytest.approx([0.5, -0.5])


def test_without_data_there_is_no_value_and_one_term_has_no_bounds() -> None:
    for terms in ([], [(3.0, 0.0)]):
        found = interval_of(terms)
        assert all(math.isnan(one) for one in (found.value, found.low, found.high))
    assert interval_of([(3.0, 2.0)]) == Interval(1.5, -math.inf, math.inf)


def test_of_400_samples_95_in_100_intervals_hold_the_truth() -> None:
    generator, inside = random.Random(0), 0
    for _ in range(400):
        sizes = [generator.lognormvariate(0.0, 0.5) for _ in range(40)]
        found = interval_of([(size * generator.gauss(3.0, 1.0), size) for size in sizes])
        inside += found.low <= 3.0 <= found.high
    assert 0.92 <= inside / 400 <= 0.98


def test_a_difference_of_two_ratios_is_as_sure_as_their_terms_move_together() -> None:
    terms = [(2.0 * size, size) for size in (1.0, 2.0, 5.0)]
    other = [(3.0 * size, size) for size in (1.0, 2.0, 5.0)]
    moved = [a - b for a, b in zip(influence(other), influence(terms), strict=True)]
    found = interval(ratio(other) - ratio(terms), moved)
    assert (found.low, found.value, found.high) == pytest.approx((1.0, 1.0, 1.0))
