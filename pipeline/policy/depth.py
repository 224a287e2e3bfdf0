"""How many draft tokens each sequence may have verified in the next step.

    a     probability that a draft token is accepted, given its predecessors were
    a^j   worth of the j-th draft token of a sequence, in tokens
    E/T   expected tokens over expected seconds of the whole step: what is maximised

Every step yields one token per sequence for the price of a pass without drafts. As worths fall
with j, the best k draft tokens of a step are the first k of all, sorted by worth; only k is to be
chosen, and every k is looked at, so the price of a pass may have any shape. Tokens of the local
draft model also cost its passes, which the sequences of a batch share: every number of passes is
tried. Depth 0 needs no case of its own.
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
    count, depth = len(limits), int(limits.max(initial=0))
    # 1) All draft tokens there are, by falling worth. A token of the draft model has a price of its
    #    own on top of being verified, and stands behind a free one of equal worth.
    j = np.arange(1, depth + 1)
    worth = np.where(j <= limits[:, None], rates[:, None] ** j, 0.0)
    margin = 1.0 + np.where(modelled, _relative(cost), 0.0)[:, None]
    order = np.argsort(-(worth / margin), axis=None, kind="stable")
    worth = worth.ravel()[order]
    order, worth = order[worth > 0], worth[worth > 0]
    owners, places = np.divmod(order, max(depth, 1))
    of_model = modelled[owners]
    # 2) The best number of them, for every number of passes of the draft model.
    passes = min(int(limits[modelled].max(initial=0)), MAX_PASSES)
    best: tuple[float, float, NDArray[np.int64]] | None = None
    for k in range(passes + 1):
        kept = slice(None) if not passes else np.flatnonzero(~of_model | (places < k))
        gains, models = worth[kept][: cost.most], of_model[kept][: cost.most]
        tokens = count + others + np.concatenate(([0.0], np.cumsum(gains)))
        drafting = (cost.draft_call_sec + k * cost.draft_pass_sec) if k else 0.0
        own = np.concatenate(([0.0], np.cumsum(models))) * cost.draft_row_sec
        seconds = np.maximum(cost.verify_sec[: len(tokens)] + own + drafting, 1e-12)
        taken = int(np.argmax(tokens / seconds))
        if best is None or tokens[taken] * best[1] > best[0] * seconds[taken]:
            best = (float(tokens[taken]), float(seconds[taken]), owners[kept][:taken])
    assert best is not None, "zero passes are always tried"
    depths = np.bincount(best[2], minlength=count)
    return DepthDecision(tuple(depths.tolist()), best[0], best[1])


def _relative(cost: StepCost) -> float:
    """Price of a draft model's token beside that of verifying one."""
    if cost.most < 1 or not cost.draft_row_sec:
        return 0.0
    row = (cost.verify_sec[-1] - cost.verify_sec[0]) / cost.most
    return float(cost.draft_row_sec / max(row, 1e-12))
