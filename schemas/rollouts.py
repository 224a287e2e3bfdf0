"""A candidate draft model that drafts for a growing share of groups, and what they showed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from specbatch.schemas.registry import DeployScope

DEFAULT_STEPS = (0.0, 0.01, 0.05, 0.25, 1.0)  # shares of groups; at 0 it drafts in shadow


def shares_of(percents: Sequence[float]) -> tuple[float, ...]:
    """Shares of groups, one after the other. Raises `ValueError` unless they rise to all groups."""
    shares = tuple(percent / 100.0 for percent in percents)
    rising = all(a < b for a, b in pairwise(shares))
    part = any(0.0 < share < 1.0 for share in shares)
    if not (part and rising) or shares[0] < 0.0 or shares[-1] != 1.0:
        raise ValueError(
            "must be rising percentages, one of them between 0 and 100, that end with 100, such as "
            "0,1,5,25,100"
        )
    return shares


class Outcome(StrEnum):
    """How a rollout ends."""

    BETTER = "better"
    WORSE = "worse"
    UNDECIDED = "undecided"  # many groups showed no difference
    STOPPED = "stopped"  # by an operator


@dataclass(frozen=True, slots=True)
class Observed:
    """What one group showed."""

    share: float  # of groups that the candidate drafted for then
    is_candidate: bool  # it drafted for this one
    tokens: int  # of the group's completions, whoever made them
    cost: float  # of these, above 0, in any unit that all groups have in common
    accepted: int = 0  # draft tokens
    shadow_drafts: int = 0  # pairs of drafts behind the same tokens …
    shadow_candidate: int = 0  # … and the accepted tokens of both models
    shadow_serving: int = 0

    @property
    def earned(self) -> float:
        """Tokens per unit of cost."""
        return self.tokens / self.cost


@dataclass(frozen=True, slots=True)
class Rollout:
    """A candidate beside the model that is deployed for a scope."""

    number: int  # in the order they began
    fingerprint: str  # of the candidate
    scope: DeployScope
    present: str  # fingerprint of the model that it is compared with
    steps: tuple[float, ...]
    step: int  # of these, the one that counts now
    started_at: float  # seconds since the epoch, by the store
    started_by: str
    reason: str
    better: float = 1.0  # how much a bet that the candidate is better has grown
    worse: float = 1.0
    outcome: Outcome | None = None  # None: it continues
    ended_at: float | None = None  # None: it counts, if only until a better model is promoted
    ended_by: str | None = None
    end_reason: str | None = None

    @property
    def share(self) -> float:
        """Of groups that the candidate drafts for."""
        return self.steps[self.step]

    @property
    def state(self) -> str:
        """In words."""
        if self.outcome is Outcome.BETTER:
            return "promoted" if self.ended_at is not None else "better: waits to be promoted"
        if self.outcome is not None:
            return self.outcome
        return "in shadow" if self.share <= 0.0 else f"drafts for {self.share:.0%} of groups"
