"""Estimates count what serving would accept, and their intervals cover what they claim."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specbatch.pipeline.learning.estimates import (
    Counts,
    acceptance,
    accepted_length,
    counts_of,
    walk,
)


def served(match: list[int], depth: int = 4) -> tuple[int, int]:
    """Drafts as an engine makes them, token by token."""
    place, passes, accepted = 1, 0, 0
    while place < len(match):
        passes += 1
        for _ in range(depth):
            if place >= len(match) or not match[place]:
                break
            accepted += 1
            place += 1
        place += 1  # the verifier's own token
    return passes, accepted


@pytest.mark.parametrize("seed", range(20))
def test_the_walk_is_the_one_that_serving_takes(seed: int) -> None:
    draw = np.random.default_rng(seed)
    match = draw.random(draw.integers(1, 40)) < draw.random()
    assert walk(match) == served(list(match))


@pytest.mark.parametrize(
    ("match", "passes", "accepted"),
    [
        ([], 0, 0),
        ([1], 0, 0),  # the first token comes with the prompt
        ([0, 1], 1, 1),
        ([0, 0, 0], 2, 0),
        ([1, 1, 1, 1, 1, 1, 1], 2, 5),  # four and the verifier's, then one to the end
        ([0, 1, 0, 1], 2, 2),
    ],
)
def test_passes_and_accepted_tokens(match: list[int], passes: int, accepted: int) -> None:
    assert walk(np.array(match, dtype=np.bool_)) == (passes, accepted)


def test_outputs_of_one_prompt_are_one_observation() -> None:
    match = [np.array([True, False, True]), np.array([True, True]), np.array([False])]
    counts = counts_of(match, [b"a", b"b", b"a"])
    assert counts.tokens.tolist() == [4, 2]
    assert counts.right.tolist() == [2, 2]


def test_a_model_is_no_better_than_itself() -> None:
    counts = some_counts(np.random.default_rng(1), 0.5)
    for compared in (acceptance(counts, counts), accepted_length(counts, counts)):
        assert compared.difference.value == 0
        assert not compared.is_better


def test_one_prompt_shows_nothing() -> None:
    match = [np.array([True, True])]
    counts, worse = counts_of(match, [b"a"]), counts_of([~match[0]], [b"a"])
    assert acceptance(worse, counts).difference.low == -math.inf
    assert not acceptance(worse, counts).is_better


def some_counts(draw: np.random.Generator, right: float, prompts: int = 40) -> Counts:
    """Prompts differ, and so the tokens of one are alike."""
    matches = []
    for _ in range(prompts):
        own = np.clip(right + draw.normal(0, 0.15), 0, 1)
        matches.append(draw.random(30) < own)
    return counts_of(matches, [bytes([i]) for i in range(prompts)])


def test_of_equal_models_few_are_called_better() -> None:
    draw = np.random.default_rng(5)
    wrong = sum(
        accepted_length(some_counts(draw, 0.6), some_counts(draw, 0.6)).is_better
        for _ in range(400)
    )
    assert wrong / 400 <= 0.05


def test_a_better_model_is_called_better() -> None:
    draw = np.random.default_rng(6)
    found = [
        accepted_length(some_counts(draw, 0.5), some_counts(draw, 0.7)).is_better for _ in range(50)
    ]
    assert sum(found) >= 45
