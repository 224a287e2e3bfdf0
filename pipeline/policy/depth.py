"""How many draft tokens each sequence may have verified in the next step.

    a     probability that a draft token is accepted, given its predecessors were
    a^j   worth of the j-th draft token of a sequence, in tokens
    E/T   expected tokens over expected seconds of the whole step: what is maximised

Every step yields one token per sequence for the base price. A further draft token is worth taking
while its worth per second exceeds E/T; as worths fall with j, the best set is a prefix of all
draft tokens sorted by worth per second (the greedy solution of a fractional knapsack). Tokens of
the local draft model also cost its passes, which the sequences of a batch share: every number of
passes is tried. Depth 0 needs no case of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Candidate:
    """One sequence that could be drafted for."""

    limit: int  # draft tokens that exist or may be made
    acceptance: float
    needs_draft_model: bool


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds; a pass is one forward pass of the draft model over the batch."""

    verify_base_sec: float
    verify_row_sec: float
    draft_base_sec: float
    draft_row_sec: float


@dataclass(frozen=True, slots=True)
class DepthDecision:
    """Draft tokens per candidate, and what the step is expected to bring."""

    depths: tuple[int, ...]
    expected_tokens: float
    expected_sec: float

    @property
    def tokens_per_sec(self) -> float:
        return self.expected_tokens / self.expected_sec


MAX_PASSES = 8


def choose_depths(
    candidates: Sequence[Candidate],
    cost: StepCost,
    max_draft_tokens: int,
) -> DepthDecision:
    """The depths of highest expected tokens per second, within `max_draft_tokens` for the step."""
    count = len(candidates)
    if not count:
        return DepthDecision((), 0.0, cost.verify_base_sec or 1e-9)
    limits = np.array([c.limit for c in candidates])
    rates = np.clip([c.acceptance for c in candidates], 0.0, 0.999)
    modelled = np.array([c.needs_draft_model for c in candidates])
    most = int(limits[modelled].max(initial=0))
    best: DepthDecision | None = None
    for passes in range(min(most, MAX_PASSES) + 1):
        allowed = np.where(modelled, np.minimum(limits, passes), limits)
        decision = _greedy(allowed, rates, modelled, passes, cost, max_draft_tokens)
        if best is None or decision.tokens_per_sec > best.tokens_per_sec:
            best = decision
    assert best is not None, "zero passes are always tried"
    return best


def _greedy(
    limits: np.ndarray,
    rates: np.ndarray,
    modelled: np.ndarray,
    passes: int,
    cost: StepCost,
    max_draft_tokens: int,
) -> DepthDecision:
    count = len(limits)
    depth = int(limits.max(initial=0))
    j = np.arange(1, depth + 1)
    worth = np.where(j <= limits[:, None], rates[:, None] ** j, 0.0)
    price = np.where(modelled, cost.verify_row_sec + cost.draft_row_sec, cost.verify_row_sec)
    price = np.maximum(np.broadcast_to(price[:, None], worth.shape), 1e-12)
    order = np.argsort(-(worth / price), axis=None, kind="stable")[:max_draft_tokens]
    order = order[worth.ravel()[order] > 0]
    tokens = count + np.concatenate(([0.0], np.cumsum(worth.ravel()[order])))
    base = cost.verify_base_sec + count * cost.verify_row_sec + passes * cost.draft_base_sec
    seconds = base + np.concatenate(([0.0], np.cumsum(price.ravel()[order])))
    taken = int(np.argmax(tokens / np.maximum(seconds, 1e-12)))
    owners = order[:taken] // max(depth, 1)
    depths = np.bincount(owners, minlength=count)
    return DepthDecision(
        tuple(int(d) for d in depths), float(tokens[taken]), max(float(seconds[taken]), 1e-12)
    )
