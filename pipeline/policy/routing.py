"""Which of several draft models is worth most for the time: tokens per unit of cost.

Times are in steps of depth 0, as these are what drafting has to beat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from specbatch.pipeline.policy import tuning
from specbatch.pipeline.policy.acceptance import Track


@dataclass(frozen=True, slots=True)
class Price:
    """Of a model's drafts for all sequences of a step, in steps of depth 0."""

    call: float  # asking it at all
    token: float  # one more draft token for every sequence: its pass, and verifying them
    row: float  # one token fed to it


def speedup(rate: float, limit: int, price: Price) -> float:
    """Tokens per sequence and step of depth 0, at the best depth up to `limit`; 1 is depth 0's."""
    best, worth, tokens, cost = 1.0, 1.0, 1.0, 1.0 + price.call
    for _ in range(limit):
        worth *= rate
        tokens += worth
        cost += price.token
        best = max(best, tokens / cost)
    return best


def speedup_behind(
    speedup: float, behind: int, price: Price, sequences: int, horizon: int
) -> float:
    """A speed-up, when the model must first read `behind` tokens to draft the next `horizon` ones.

    The whole step of `sequences` waits for it.
    """
    return 1.0 / (1.0 / speedup + behind * price.row * sequences / max(horizon, 1))


def optimistic_rate(track: Track, idle_steps: int = 0) -> float:
    """The acceptance that a model may well have, for all that is known of it."""
    rate, sure = track.rate, track.sure * _left(idle_steps)
    return min(
        0.99,
        rate + tuning.ROUTE_OPTIMISM * math.sqrt(max(rate * (1.0 - rate), 0.02) / (sure + 1.0)),
    )


def fade(track: Track, idle_steps: int) -> None:
    """Forget what optimism discounts, so that a trial counts for as much as was expected of it."""
    level = track.levels[-1]  # those above are other routes' as well
    level.agreed *= _left(idle_steps)
    level.tested *= _left(idle_steps)


def _left(idle_steps: int) -> float:
    return float(0.5 ** (idle_steps / tuning.ROUTE_FADE_STEPS))


def teams(models: Sequence[str]) -> list[tuple[str, ...]]:
    """Sets of models that may work side by side, the small ones first.

    Each model of a step has passes of its own to be paid, so the best for every row may be worse
    together than one that is good for all.
    """
    sizes = range(1, len(models) + 1) if len(models) <= tuning.MOST_TEAMED else (1, len(models))
    return [team for size in sizes for team in combinations(models, size)]
