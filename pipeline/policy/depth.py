"""How many draft tokens each sequence may have verified in the next step.

    a     probability that a draft token is accepted, given its predecessors were
    a^j   worth of the j-th draft token of a sequence, in tokens
    E/T   expected tokens over expected seconds of the whole step: what is maximised

Every step yields one token per sequence for the price of a pass without drafts. As worths fall with
j, the best k draft tokens of a step are the first k of all, sorted by worth; only k is to be chosen,
and every k is looked at, so the price of a pass may have any shape. Tokens of the local draft model
also cost its passes, which the sequences of a batch share: every number of passes is tried. Depth 0
needs no case of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_PASSES = 8


@dataclass(frozen=True, slots=True)
class Candidate:
    """One sequence that could be drafted for."""

    limit: int  # draft tokens that exist or may be made
    acceptance: float
    needs_draft_model: bool = False


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds. `verify_sec[k]` is the verifier's pass with k draft tokens in it."""

    verify_sec: NDArray[np.float64]
    draft_call_sec: float = 0.0  # asking the draft model at all
    draft_pass_sec: float = 0.0  # one pass of it over the batch
    draft_row_sec: float = 0.0  # one token in such a pass

    @property
    def most(self) -> int:
        return len(self.verify_sec) - 1


@dataclass(frozen=True, slots=True)
class DepthDecision:
    """Draft tokens per candidate, and what the step is expected to bring."""

    depths: tuple[int, ...]
    expected_tokens: float
    expected_sec: float

    @property
    def tokens_per_sec(self) -> float:
        return self.expected_tokens / self.expected_sec


def choose_depths(
    candidates: Sequence[Candidate], cost: StepCost, others: int = 0
) -> DepthDecision:
    """The depths of highest expected tokens per second, at most `cost.most` in all.

    `others` sequences take part in the step and bring a token each, whatever is chosen.
    """
    limits = np.array([c.limit for c in candidates], dtype=np.int64)
    rates = np.clip([c.acceptance for c in candidates], 0.0, 0.999)
    modelled = np.array([c.needs_draft_model for c in candidates], dtype=bool)
    passes = min(int(limits[modelled].max(initial=0)), MAX_PASSES)
    best = _among(limits * ~modelled, rates, modelled, 0, cost, others)
    for k in range(1, passes + 1):
        allowed = np.where(modelled, np.minimum(limits, k), limits)
        decision = _among(allowed, rates, modelled, k, cost, others)
        if decision.tokens_per_sec > best.tokens_per_sec:
            best = decision
    return best


def _among(
    limits: NDArray[np.int64],
    rates: NDArray[np.float64],
    modelled: NDArray[np.bool_],
    passes: int,
    cost: StepCost,
    others: int,
) -> DepthDecision:
    """The best number of draft tokens within the limits, the draft model passing `passes` times."""
    count, depth = len(limits), int(limits.max(initial=0))
    j = np.arange(1, depth + 1)
    worth = np.where(j <= limits[:, None], rates[:, None] ** j, 0.0)
    # A token of the draft model has its own price on top: it stands behind a free one.
    margin = 1.0 + np.where(modelled, _relative(cost), 0.0)[:, None]
    order = np.argsort(-(worth / margin), axis=None, kind="stable")[: cost.most]
    order = order[worth.ravel()[order] > 0]
    owners = order // max(depth, 1)
    tokens = count + others + np.concatenate(([0.0], np.cumsum(worth.ravel()[order])))
    own = np.concatenate(([0.0], np.cumsum(modelled[owners] * cost.draft_row_sec)))
    drafting = (cost.draft_call_sec + passes * cost.draft_pass_sec) if passes else 0.0
    seconds = np.maximum(cost.verify_sec[: len(tokens)] + own + drafting, 1e-12)
    taken = int(np.argmax(tokens / seconds))
    depths = np.bincount(owners[:taken], minlength=count)
    return DepthDecision(
        tuple(int(d) for d in depths), float(tokens[taken]), float(seconds[taken])
    )


def _relative(cost: StepCost) -> float:
    """Price of a draft model's token beside that of verifying one."""
    if cost.most < 1 or not cost.draft_row_sec:
        return 0.0
    row = (cost.verify_sec[-1] - cost.verify_sec[0]) / cost.most
    return cost.draft_row_sec / max(row, 1e-12)
