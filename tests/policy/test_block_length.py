"""Blocks are as long as their tokens are worth, and none where they are not."""

from __future__ import annotations

import pytest

from specbatch.pipeline.policy.depth import block_length
from specbatch.pipeline.policy.tuning import BLOCK_TESTS, PILOT_TOKENS, SHORTEST_BLOCK


def test_a_pilot_is_short_whatever_little_is_known() -> None:
    assert block_length(1.0, BLOCK_TESTS - 1, 512) == PILOT_TOKENS
    assert block_length(0.0, 0.0, 32) == 8, "a quarter of a completion"
    assert block_length(0.0, 0.0, 8) == SHORTEST_BLOCK
    assert block_length(0.0, 0.0, 3) == 3


def test_drafts_that_always_fit_are_as_long_as_may_be() -> None:
    assert block_length(1.0, 1000.0, 512) == 512


@pytest.mark.parametrize("acceptance", [0.0, 0.2, 0.25])
def test_what_costs_more_than_it_brings_is_not_written(acceptance: float) -> None:
    assert block_length(acceptance, 1000.0, 512, price=0.25) == 0


def test_longer_with_acceptance_and_shorter_with_price() -> None:
    by_acceptance = [block_length(a / 20, 1000.0, 512, price=0.2) for a in range(21)]
    assert by_acceptance == sorted(by_acceptance)
    assert by_acceptance[0] == 0 < by_acceptance[12] < by_acceptance[18] < 512
    by_price = [block_length(0.8, 1000.0, 512, price=p / 20) for p in range(1, 21)]
    assert by_price == sorted(by_price, reverse=True)
    assert by_price[0] > 40 > by_price[-1] == 0


def test_the_last_token_is_worth_its_price_and_a_further_one_is_not() -> None:
    acceptance, price = 0.85, 0.2
    length = block_length(acceptance, 1000.0, 10_000, price)
    used = [(1.0 - (1.0 - acceptance) * 0.25) ** place * acceptance for place in range(length + 2)]
    assert used[length] >= price > used[length + 1]


def test_a_block_too_short_for_its_trip_is_not_written() -> None:
    assert block_length(0.5, 1000.0, 512, price=0.45) == 0


def test_what_costs_nothing_is_written_as_far_as_may_be() -> None:
    assert block_length(0.5, 1000.0, 512, price=0.0) == 512
    assert block_length(0.9, BLOCK_TESTS, 512) == block_length(0.9, BLOCK_TESTS, 512, 0.25) > 0


def test_enough_tests_are_believed() -> None:
    assert block_length(0.0, BLOCK_TESTS - 0.5, 512) == PILOT_TOKENS
    assert block_length(0.0, BLOCK_TESTS, 512) == 0


def test_no_block_is_shorter_than_the_shortest_and_that_one_is_written() -> None:
    lengths = {block_length(0.8, 1000.0, 512, price=p / 1000) for p in range(500, 1000)}
    assert min(lengths - {0}) == SHORTEST_BLOCK
