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
_WORTHLESS = 1e-3  # a draft token accepted less often is never verified


@dataclass(frozen=True, slots=True)
class Candidate:
    """One sequence that could be drafted for."""

    limit: int  # draft tokens that exist or may be made
    acceptance: float
    model: str | None = None  # the draft model that would make them; None: they cost nothing


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
    least_worth: float = 1.0  # of the draft tokens taken: what one must be worth to be verified

    @property
    def tokens_per_sec(self) -> float:
        return self.expected_tokens / self.expected_sec


def choose_depths(
    candidates: Sequence[Candidate], cost: StepCost, others: float = 0
) -> DepthDecision:
    """The depths of highest expected tokens per second, at most `cost.most` in all.

    `others` tokens come of the step whatever is chosen. All draft models among the candidates
    count as one: the price of a pass is `cost`'s.
    """
    limits = np.array([c.limit for c in candidates], dtype=np.int64)
    rates = np.clip([c.acceptance for c in candidates], 0.0, 0.999)
    modelled = np.array([c.model is not None for c in candidates], dtype=bool)
    count, depth = len(limits), int(limits.max(initial=0))
    # 1) All draft tokens there are, by falling worth. A token of the draft model has a price of its
    #    own on top of being verified, and stands behind a free one of equal worth.
    worth = np.repeat(rates[:, None], depth, axis=1).cumprod(axis=1)
    worth[np.arange(depth) >= limits[:, None]] = 0.0
    net = worth / (1.0 + _relative(cost) * modelled)[:, None] if modelled.any() else worth
    order = np.argsort(-net, axis=None, kind="stable")
    order = order[: int(np.count_nonzero(worth > _WORTHLESS))]
    worth = worth.ravel()[order]
    owners, places = np.divmod(order, max(depth, 1))
    of_model = modelled[owners]
    # 2) The best number of them, for every number of passes of the draft model.
    passes = min(int(limits[modelled].max(initial=0)), MAX_PASSES)
    best = (count + others + 0.0, float(cost.verify_sec[0]), owners[:0], 1.0)
    for k in range(passes + 1):
        kept = slice(None) if not passes else np.flatnonzero(~of_model | (places < k))
        gains = worth[kept][: cost.most]
        tokens = np.cumsum(gains) + (count + others)
        seconds = cost.verify_sec[1 : len(tokens) + 1]
        if k:
            own = np.cumsum(of_model[kept][: cost.most]) * cost.draft_row_sec
            seconds = seconds + own + (cost.draft_call_sec + k * cost.draft_pass_sec)
        if not len(tokens):
            continue
        at = int(np.argmax(tokens / seconds))
        if tokens[at] * best[1] > best[0] * seconds[at]:
            best = (float(tokens[at]), float(seconds[at]), owners[kept][: at + 1], float(gains[at]))
    depths = np.bincount(best[2], minlength=count)
    return DepthDecision(tuple(depths.tolist()), best[0], best[1], best[3])


def _relative(cost: StepCost) -> float:
    """Price of a draft model's token beside that of verifying one."""
    if cost.most < 1 or not cost.draft_row_sec:
        return 0.0
    row = (cost.verify_sec[-1] - cost.verify_sec[0]) / cost.most
    return float(cost.draft_row_sec / max(row, 1e-12))


def break_even(cost: StepCost, sequences: int, of_model: bool, margin: float = 1.0) -> float:
    """The acceptance, alike for all sequences, from which on drafting pays; above 1: it cannot.

    It pays where it brings `margin` times the tokens per second of depth 0. Tried are one token for
    some of the sequences, and up to `MAX_PASSES` for all of them.
    """
    plain = float(cost.verify_sec[0]) / margin
    found = np.inf
    some = np.arange(1, min(sequences, cost.most) + 1)
    if len(some):
        seconds = cost.verify_sec[some] + _drafting(cost, some, 1.0, of_model)
        found = float(((seconds / plain - 1.0) * sequences / some).min())
    for depth in range(2, min(MAX_PASSES, cost.most // max(sequences, 1)) + 1):
        tokens = np.array([depth * sequences])
        seconds = cost.verify_sec[tokens] + _drafting(cost, tokens, depth, of_model)
        needed = float(seconds[0]) / plain - 1.0  # a + a^2 + … must bring so much
        if needed < depth:
            roots = np.roots([*([1.0] * depth), -needed])
            real = roots[(abs(roots.imag) < 1e-9) & (roots.real >= 0)].real
            found = min(found, float(real.min(initial=np.inf)))
    return max(found, 0.0)


def _drafting(
    cost: StepCost, tokens: NDArray[np.int64], passes: float, of_model: bool
) -> NDArray[np.float64]:
    if not of_model:
        return np.zeros(len(tokens))
    rows = tokens.astype(np.float64) * cost.draft_row_sec
    return rows + (cost.draft_call_sec + passes * cost.draft_pass_sec)
