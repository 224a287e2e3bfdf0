"""Whether a candidate draft model earns more than the one that drafts now: more tokens per unit of
cost. Outputs are the same whoever drafts, so what they cost is all there is to compare.

Chance decides for which groups the candidate drafts. If it makes no difference who drafts, a
group's figures say nothing of which model it was, so bets on that win nothing in the long run. A
gambler begins with one unit and bets that the candidate's groups stand higher among all groups so
far. If the candidate is no better, the capital reaches 1/p with a probability of p at most, however
often one looks (Ville's inequality; G. Shafer, Testing by betting, JRSS A 184, 2021). A second
gambler bets that they stand lower. Ranks are bet on, not figures, so one slow minute counts no more
than one group, and shares may change on the way. Shadow drafts do not say what a model costs: one
with worse drafts may still earn more. Only where both cost the same, because only their weights
differ, they are bet on too: whose drafts of a group had more accepted tokens. Both drafted at the
same places, so that tells far sooner, and the rollout stays in shadow for it.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from specbatch.pipeline.policy.ratios import Interval, interval_of
from specbatch.schemas.rollouts import Observed, Outcome

ERROR = 0.02  # probability of each wrong verdict on a model that is just as good
STAKES = (0.1, 0.2, 0.4, 0.8)  # shares of the capital; the gambler spreads it over these
SHADOW_GROUPS = 16  # in which both were compared before the candidate drafts for any …
MOST_SHADOW_GROUPS = 64  # … or so many, where nothing can be compared
PAIRED_GROUPS = 400  # in shadow without a verdict, of models that cost the same
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
class RolloutState:
    """A rollout's way through its shares, group by group, until it is decided.

    It ends as soon as one gambler has 1/`ERROR`.
    """

    steps: Sequence[float]
    same_cost: bool = False  # both models draft in the same time
    step: int = 0  # of these, the one that counts now
    outcome: Outcome | None = None  # None: it continues
    _better: Gambler = field(default_factory=Gambler)
    _worse: Gambler = field(default_factory=Gambler)
    _ranked: list[float] = field(default_factory=list)  # what groups earned
    _groups: int = 0
    _at_step: int = 0  # groups at this share …
    _telling: int = 0  # … of which so many count for the next one

    @property
    def share(self) -> float:
        return self.steps[self.step]

    @property
    def better(self) -> float:
        """Capital of who bets that the candidate is better."""
        return self._better.capital

    @property
    def worse(self) -> float:
        return self._worse.capital

    def add(self, seen: Observed) -> None:
        """The next group, in the order in which they ended."""
        if self.outcome is not None:
            return
        if seen.share > 0.0:
            self._bet(seen)
        elif self.same_cost:
            self._bet_on_shadow(seen)
        self._groups += 1
        if seen.share == self.share:
            self._at_step += 1
            self._telling += bool(seen.is_candidate if seen.share else seen.shadow_drafts)
        if self.worse >= 1.0 / ERROR:
            self.outcome = Outcome.WORSE
        elif self.better >= 1.0 / ERROR:
            self.outcome, self.step = Outcome.BETTER, len(self.steps) - 1
        elif self._groups >= MOST_GROUPS:
            self.outcome = Outcome.UNDECIDED
        elif self._may_go_on:
            self.step, self._at_step, self._telling = self.step + 1, 0, 0

    @property
    def _may_go_on(self) -> bool:
        """To the next share, which is not all groups: that takes a verdict."""
        if self.step + 2 >= len(self.steps):
            return False
        if self.share:
            return self._telling >= CANARY_GROUPS
        if self.same_cost and self._telling:
            return self._at_step >= PAIRED_GROUPS
        return self._telling >= SHADOW_GROUPS or self._at_step >= MOST_SHADOW_GROUPS

    def _bet(self, seen: Observed) -> None:
        drawn = (1.0 if seen.is_candidate else 0.0) - seen.share
        won = self._standing(seen.earned) * drawn / max(seen.share, 1.0 - seen.share)
        self._better.bet(won)
        self._worse.bet(-won)

    def _bet_on_shadow(self, seen: Observed) -> None:
        more = seen.shadow_candidate - seen.shadow_serving
        won = float((more > 0) - (more < 0))
        self._better.bet(won)
        self._worse.bet(-won)

    def _standing(self, earned: float) -> float:
        """Of a group among those so far: 1 above all, -1 below all."""
        ranked = self._ranked
        below = bisect_left(ranked, earned)
        above = len(ranked) - bisect_right(ranked, earned)
        standing = (below - above) / len(ranked) if ranked else 0.0
        insort(ranked, earned)
        return standing


def state_of(
    steps: Sequence[float], groups: Iterable[Observed], same_cost: bool = False
) -> RolloutState:
    """Where a rollout stands after all its groups."""
    state = RolloutState(steps, same_cost)
    for seen in groups:
        state.add(seen)
    return state


def is_drawn(rollout: int, job_id: str, group_index: int, share: float) -> bool:
    """Whether the candidate drafts for a group; the same at every attempt."""
    text = f"{rollout}/{job_id}/{group_index}".encode()
    drawn = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    return drawn < share * 2.0**64


def tokens_per_cost(groups: Sequence[Observed], of_candidate: bool) -> Interval:
    """Over the groups in which chance chose who drafts."""
    return interval_of([(seen.tokens, seen.cost) for seen in _drawn(groups, of_candidate)])


def accepted_share(groups: Sequence[Observed], of_candidate: bool) -> Interval:
    """Of the tokens, those that were drafted and accepted; a figure that is shown, no more."""
    return interval_of([(seen.accepted, seen.tokens) for seen in _drawn(groups, of_candidate)])


def accepted_in_shadow(groups: Sequence[Observed], of_candidate: bool) -> Interval:
    """Accepted tokens of a shadow draft; both models drafted at the same places."""
    return interval_of(
        [
            (seen.shadow_candidate if of_candidate else seen.shadow_serving, seen.shadow_drafts)
            for seen in groups
        ]
    )


SIDES = {"candidate": True, "present model": False}
FIGURES = {
    "tokens per device second": tokens_per_cost,
    "accepted share of tokens": accepted_share,
    "accepted tokens of a shadow draft": accepted_in_shadow,
}


def figures_of(groups: Sequence[Observed]) -> dict[str, dict[str, Interval]]:
    """What people are shown of a rollout's groups: by figure, then by side."""
    return {
        name: {side: figure(groups, which) for side, which in SIDES.items()}
        for name, figure in FIGURES.items()
    }


def _drawn(groups: Sequence[Observed], of_candidate: bool) -> list[Observed]:
    return [seen for seen in groups if seen.share > 0.0 and seen.is_candidate is of_candidate]
