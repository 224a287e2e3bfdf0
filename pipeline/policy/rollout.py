"""Whether a candidate draft model earns more than the one that drafts now.

Chance decides for which groups the candidate drafts. If it makes no difference who drafts, a
group's figures say nothing of which model it was, so bets on that win nothing in the long run. A
gambler begins with one unit and bets that the candidate's groups stand higher among all groups so
far. If the candidate is no better, the capital reaches 1/p with a probability of p at most, however
often one looks (Ville's inequality; G. Shafer, Testing by betting, JRSS A 184, 2021). A second
gambler bets that they stand lower. Ranks are bet on, not figures, so one slow minute counts no more
than one group, and shares may change on the way.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from specbatch.schemas.rollouts import Observed, Outcome

ERROR = 0.02  # probability of each wrong verdict on a model that is just as good
STAKES = (0.1, 0.2, 0.4, 0.8)  # shares of the capital; the gambler spreads it over these
SHADOW_GROUPS = 16  # in which both were compared before the candidate drafts for any
CANARY_GROUPS = 4  # that it drafts for at each share, at least
MOST_GROUPS = 2000  # of a rollout without a verdict; then the present model stays


@dataclass(slots=True)
class Gambler:
    """Its capital after each bet. Bets are on numbers from -1 to 1 that average 0 or less."""

    _of_stakes: list[float] = field(default_factory=lambda: [1.0 / len(STAKES)] * len(STAKES))

    @property
    def capital(self) -> float:
        return sum(self._of_stakes)

    def bet(self, won: float) -> None:
        for i, stake in enumerate(STAKES):
            self._of_stakes[i] *= 1.0 + stake * won


@dataclass(slots=True)
class Evidence:
    """Two gamblers' capital on a rollout's groups so far."""

    better: Gambler = field(default_factory=Gambler)
    worse: Gambler = field(default_factory=Gambler)
    _ranked: list[float] = field(default_factory=list)

    def add(self, seen: Observed) -> None:
        if seen.share <= 0.0:
            self._bet(_sign(seen.shadow_candidate - seen.shadow_serving))
        elif seen.share < 1.0:
            chance = seen.share
            drawn = (1.0 if seen.is_candidate else 0.0) - chance
            self._bet(self._standing(seen.earned) * drawn / max(chance, 1.0 - chance))

    def _standing(self, earned: float) -> float:
        """Of a group among those so far: 1 above all, -1 below all."""
        ranked = self._ranked
        below = bisect_left(ranked, earned)
        above = len(ranked) - bisect_right(ranked, earned)
        standing = (below - above) / len(ranked) if ranked else 0.0
        insort(ranked, earned)
        return standing

    def _bet(self, won: float) -> None:
        self.better.bet(won)
        self.worse.bet(-won)


def _sign(number: int) -> float:
    return float((number > 0) - (number < 0))


@dataclass(slots=True)
class Course:
    """A rollout's way through its shares, group by group, until it is decided.

    It ends as soon as one gambler has 1/`ERROR`. Shadow drafts can end it as worse, and never as
    better: they say nothing of cost.
    """

    steps: Sequence[float]
    step: int = 0  # of these, the one that counts now
    outcome: Outcome | None = None  # None: it goes on
    _canary: Evidence = field(default_factory=Evidence)
    _shadow: Evidence = field(default_factory=Evidence)
    _groups: int = 0
    _at_step: int = 0  # groups that count for the next step

    @property
    def share(self) -> float:
        return self.steps[self.step]

    @property
    def better(self) -> float:
        """Capital of who bets that the candidate is better."""
        return self._canary.better.capital

    @property
    def worse(self) -> float:
        return max(self._canary.worse.capital, self._shadow.worse.capital)

    def add(self, seen: Observed) -> None:
        """The next group, in the order in which they ended."""
        if self.outcome is not None:
            return
        (self._canary if seen.share else self._shadow).add(seen)
        self._groups += 1
        self._at_step += seen.share == self.share and bool(
            seen.is_candidate if seen.share else seen.shadow_drafts
        )
        if self.worse >= 1.0 / ERROR:
            self.outcome = Outcome.WORSE
        elif self.better >= 1.0 / ERROR:
            self.outcome, self.step = Outcome.BETTER, len(self.steps) - 1
        elif self._groups >= MOST_GROUPS and self._is_last:
            self.outcome = Outcome.UNDECIDED
        elif not self._is_last and self._at_step >= self._needed:
            self.step, self._at_step = self.step + 1, 0

    @property
    def _needed(self) -> int:
        """Groups at this share before the next one."""
        return CANARY_GROUPS if self.share else SHADOW_GROUPS

    @property
    def _is_last(self) -> bool:
        """Of the shares below all."""
        return self.step + 2 >= len(self.steps)


def course_of(steps: Sequence[float], groups: Iterable[Observed]) -> Course:
    """Where a rollout stands after all its groups."""
    course = Course(steps)
    for seen in groups:
        course.add(seen)
    return course


def is_drawn(rollout: int, job_id: str, group_index: int, share: float) -> bool:
    """Whether the candidate drafts for a group; the same at every attempt."""
    text = f"{rollout}/{job_id}/{group_index}".encode()
    drawn = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    return drawn < share * 2.0**64


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of two sums over groups, with its 95 % interval at one look; NaN without groups."""

    value: float
    low: float
    high: float


def accepted_per_cost(groups: Sequence[Observed], of_candidate: bool) -> Ratio:
    """Over the groups in which chance chose who drafts."""
    mine = [seen for seen in groups if seen.share > 0.0 and seen.is_candidate is of_candidate]
    return _ratio([(float(seen.accepted), seen.cost) for seen in mine])


def accepted_in_shadow(groups: Sequence[Observed], of_candidate: bool) -> Ratio:
    """Accepted tokens of a shadow draft; both models drafted at the same places."""
    return _ratio(
        [
            (
                float(seen.shadow_candidate if of_candidate else seen.shadow_serving),
                float(seen.shadow_drafts),
            )
            for seen in groups
        ]
    )


def _ratio(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """By how far each group moves the ratio (its influence)."""
    whole = sum(of for _, of in pairs)
    if not whole:
        return Ratio(math.nan, math.nan, math.nan)
    value, n = sum(part for part, _ in pairs) / whole, len(pairs)
    if n < 2:
        return Ratio(value, -math.inf, math.inf)
    squares = sum(((part - value * of) / whole) ** 2 for part, of in pairs)
    half = 1.96 * math.sqrt(squares * n / (n - 1))
    return Ratio(value, value - half, value + half)
