"""How much sequences differ in acceptance, and so what one's own record counts beside all others'.

A record of thirty tests says little: at an acceptance of 0.9 it errs by 0.05, which is the
difference between eight draft tokens and sixteen. Where sequences are alike the rate of all is the
better guess for each; where they differ, their own is. How far they do is estimated by moments of a
beta-binomial law (Williams, Biometrics 31, 1975), as a share of the variance of a single test: the
jobs and grades of one proposer have acceptances far apart, and records of a job of 0.5 must not
make the sequences of one of 0.9 look unlike each other.
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
_LEAST_VARIANCE = 1e-3  # of a test: no draft is sure
_RECORDS = 96
_EVERY = 8  # records between two estimates
_RECORDS_NEEDED = 12


@dataclass(slots=True)
class Spread:
    """Of one proposer's drafts. `weight` is the prior's, in tests."""

    weight: float = FIRST_WEIGHT
    # Squared distance from what was expected, over what chance alone makes of it; and its tests.
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
        away = agreed - expected * tested
        chance = tested * max(expected * (1.0 - expected), _LEAST_VARIANCE)
        self._records.append((away * away / chance, tested))
        self._new += 1
        if self._new >= _EVERY and len(self._records) >= _RECORDS_NEEDED:
            self._new = 0
            self._estimate()

    def _estimate(self) -> None:
        # A record's squared distance is expected to be 1 + (tested - 1) times that share.
        excess = sum(away - 1.0 for away, _ in self._records)
        share = excess / sum(tested - 1.0 for _, tested in self._records)
        wanted = MOST_WEIGHT if share <= 0 else 1.0 / share - 1.0
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
