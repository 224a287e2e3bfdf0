"""Machines whose prices are known: seconds of a pass, by its tokens and sequences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Machine = Callable[[int, int], float]
MOST = 16  # draft tokens per sequence


def linear(tokens: int, sequences: int) -> float:
    return 8e-4 + 2.5e-5 * tokens + 1.5e-5 * sequences


def stepped(tokens: int, sequences: int) -> float:
    """Matrix units work in sixteens; weights must be read however few tokens there are."""
    return max(1.2e-3, 4e-4 * -(-tokens // 16)) + 1e-5 * sequences


def saturating(tokens: int, sequences: int) -> float:
    """Free until the arithmetic outweighs the reading of weights."""
    return max(1.4e-2, 3.5e-4 * tokens) + 1e-4 * sequences


def best(machine: Machine, rates: list[float]) -> float:
    """By trying every number of draft tokens, each time the most likely ones."""
    worths = sorted((r**j for r in rates for j in range(1, MOST + 1)), reverse=True)
    tokens = len(rates) + np.concatenate(([0.0], np.cumsum(worths)))
    count = len(rates)
    seconds = [machine(count + k, count) for k in range(len(worths) + 1)]
    return float((tokens / np.array(seconds)).max())
