"""Estimates on held-out outputs how a model's drafts would be accepted, with 95 % intervals.

It is all teacher-forced: a draft token counts as right where the model's most likely token is what
the verifier wrote. A draft ends at its first wrong token, and up to there the model reads what it
would read when it serves, so the walk through an output is the one that serving would take. Where
the verifier samples, a served draft draws with the verifier's noise and does a little better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from specbatch.pipeline.policy.ratios import Interval, influence, interval, ratio
from specbatch.schemas.training import DEPTH

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """What a model got right in each prompt's outputs; arrays with an entry per prompt."""

    tokens: Floats  # of the verifier
    right: Floats  # of these, the model's most likely token
    passes: Floats  # that the verifier needs with drafts of `DEPTH` tokens
    accepted: Floats  # draft tokens, in these passes

    @property
    def length(self) -> float:
        """Accepted draft tokens in a pass: what a checkpoint is chosen by."""
        return ratio(_terms(self.accepted, self.passes))


def counts_of(matches: Sequence[npt.NDArray[np.bool_]], prompts: Sequence[bytes]) -> Counts:
    """`matches`: of each output, where the model is right. Outputs of one prompt are one entry."""
    rows: dict[bytes, list[int]] = {}
    for match, prompt in zip(matches, prompts, strict=True):
        passes, accepted = walk(match)
        row = rows.setdefault(prompt, [0, 0, 0, 0])
        for i, n in enumerate((len(match), int(match.sum()), passes, accepted)):
            row[i] += n
    table = np.array(list(rows.values()), dtype=np.float64).reshape(-1, 4)
    return Counts(*table.T)


def walk(match: npt.NDArray[np.bool_], depth: int = DEPTH) -> tuple[int, int]:
    """(passes, accepted draft tokens) of writing one output with drafts of `depth` tokens.

    The first token comes with the prompt; it is no pass.
    """
    place, passes, accepted = 1, 0, 0
    while place < len(match):
        wrong = np.flatnonzero(~match[place : place + depth])
        run = int(wrong[0]) if len(wrong) else min(depth, len(match) - place)
        place += run + 1
        passes += 1
        accepted += run
    return passes, accepted


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of parent and candidate on the same outputs, and their difference."""

    parent: Interval
    candidate: Interval
    difference: Interval

    @property
    def is_better(self) -> bool:
        """Whether the candidate is better beyond the interval."""
        return self.difference.low > 0

    def as_json(self) -> dict[str, dict[str, float]]:
        return asdict(self)


def acceptance(parent: Counts, candidate: Counts) -> Compared:
    """Share of the verifier's tokens that the model would have drafted."""
    return _compared(parent.right, parent.tokens, candidate.right, candidate.tokens)


def accepted_length(parent: Counts, candidate: Counts) -> Compared:
    """Accepted draft tokens in a pass of the verifier at depth `DEPTH`."""
    return _compared(parent.accepted, parent.passes, candidate.accepted, candidate.passes)


def _compared(a: Floats, of_a: Floats, b: Floats, of_b: Floats) -> Compared:
    """Prompts are independent, the outputs of one are not. The difference is of pairs."""
    parent, candidate = _terms(a, of_a), _terms(b, of_b)
    first, second = influence(parent), influence(candidate)
    one, other = ratio(parent), ratio(candidate)
    moved = [mine - its for mine, its in zip(second, first, strict=True)]
    return Compared(interval(one, first), interval(other, second), interval(other - one, moved))


def _terms(part: Floats, whole: Floats) -> list[tuple[float, float]]:
    return list(zip(part.tolist(), whole.tolist(), strict=True))
