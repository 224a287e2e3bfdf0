"""What could be drafted for a sequence, and by whom."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from specbatch.pipeline.engines.exact.proposers.proposer import Proposer
from specbatch.pipeline.engines.exact.state.sequence import Sequence
from specbatch.pipeline.policy.depth import Candidate

_SURE = 0.999

Choice = tuple[Proposer, int]  # who drafts, and how many tokens


@dataclass(slots=True, eq=False)  # not frozen: thousands are made a second
class Want:
    """One source for a sequence, as a look found it."""

    sequence: Sequence
    proposer: Proposer
    limit: int
    rate: float
    score: float  # acceptance, less what its drafts cost

    @property
    def model(self) -> str | None:
        return model_of(self.proposer)


def candidates(wants: Seq[Want]) -> list[Candidate]:
    return [Candidate(w.limit, w.rate, w.model) for w in wants]


def model_of(proposer: Proposer) -> str | None:
    """The draft model's name; None: its drafts are free."""
    return None if proposer.pass_time is None else proposer.name


def depth_worth(rate: float, least_worth: float, most: int) -> int:
    """How many draft tokens of this acceptance are worth so much each."""
    if rate >= _SURE:
        return most
    return max(1, min(most, int(math.log(least_worth) / math.log(rate))))


def choices(wants: Seq[Want], depths: Seq[int]) -> dict[Sequence, Choice]:
    pairs = zip(wants, depths, strict=True)
    return {want.sequence: (want.proposer, depth) for want, depth in pairs}


def usual(chosen: Seq[tuple[Want, int]]) -> Choice:
    """The best source of some sequences, and how deep it is followed on average."""
    leader = max(chosen, key=lambda c: c[0].rate)[0].proposer
    depths = [depth for want, depth in chosen if want.proposer is leader]
    return leader, round(sum(depths) / len(depths))
