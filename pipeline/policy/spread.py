"""How much sequences differ in acceptance, and so what one's own record counts beside all others'.

A record of thirty tests says little: at an acceptance of 0.9 it errs by 0.05, which is the
difference between eight draft tokens and sixteen. Where sequences are alike the rate of all is the
better guess for each; where they differ, their own is. The between-sequence variance is estimated
by moments (DerSimonian and Laird, Controlled Clinical Trials 7, 1986).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from specbatch.pipeline.policy.acceptance import Acceptance

FIRST_WEIGHT = 16.0  # tests that the rate of all counts for, while nothing is known
LEAST_WEIGHT = 2.0
MOST_WEIGHT = 400.0
WINDOW_TESTS = 32  # of one sequence, that make a record
_FEWEST_TESTS = 8
_RECORDS = 96
_EVERY = 8  # records between two estimates
_RECORDS_NEEDED = 12


@dataclass(slots=True)
class Spread:
    """Of one proposer's drafts. `weight` is the prior's, in tests."""

    weight: float = FIRST_WEIGHT
    _records: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_RECORDS))
    _new: int = 0

    @classmethod
    def restored(cls, weight: float) -> Spread:
        """With what was learned before. Raises `ValueError` for what no spread has learned."""
        if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
            raise ValueError(f"the rate of all cannot count for {weight} tests")
        return cls(weight)

    def add(self, agreed: float, tested: float, expected: float) -> None:
        """A sequence's record: `agreed` of `tested` draft tokens, where all have `expected`."""
        if tested < _FEWEST_TESTS:
            return
        self._records.append((agreed - expected * tested, tested))
        self._new += 1
        if self._new >= _EVERY and len(self._records) >= _RECORDS_NEEDED:
            self._new = 0
            self._estimate(expected)

    def _estimate(self, expected: float) -> None:
        within = max(expected * (1.0 - expected), 1e-3)
        total = sum(tested for _, tested in self._records)
        squares = sum(tested * tested for _, tested in self._records)
        excess = sum(away * away / tested for away, tested in self._records)
        between = (excess - len(self._records) * within) / (total - squares / total)
        wanted = MOST_WEIGHT if between <= 0 else within / between
        self.weight = min(max(wanted, LEAST_WEIGHT), MOST_WEIGHT)


@dataclass(slots=True)
class Own:
    """One sequence's record of one proposer's drafts."""

    faded: Acceptance = field(default_factory=Acceptance)
    agreed: int = 0  # since the last record
    tested: int = 0

    def observe(self, proposed: int, accepted: int) -> bool:
        """A verdict on a draft; True: the record is long enough to be closed."""
        self.faded.observe(proposed, accepted)
        self.agreed += accepted
        self.tested += accepted + (accepted < proposed)
        return self.tested >= WINDOW_TESTS

    def close(self, expected: float, spread: Spread) -> None:
        """The record is over; drafts of all sequences are accepted at `expected`."""
        spread.add(self.agreed, self.tested, expected)
        self.agreed = self.tested = 0

    def rate(self, expected: float, spread: Spread) -> float:
        """The sequence's acceptance, with that of all as the prior."""
        self.faded.weight = spread.weight
        return self.faded.rate_given(expected)
