"""How much sequences differ in acceptance, and so what one's own record counts beside all others'.

A record of thirty tests says little: at an acceptance of 0.9 it errs by 0.05, which is the
difference between eight draft tokens and sixteen. Where sequences are alike the rate of all is the
better guess for each; where they differ, their own is. What is asked is not how far records lie
apart: easy and hard passages take turns within a text, and make them differ by more than chance
while none of them tells of the next. It is how far the next record of a sequence follows its last
one: the slope of a regression, which is the credibility that a record deserves (Bühlmann, ASTIN
Bulletin 4, 1967). Distances are counted in those that chance alone makes: the jobs and grades of
one proposer have acceptances far apart.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean

from specbatch.pipeline.policy.acceptance import Acceptance

FIRST_WEIGHT = 16.0  # tests that the rate of all counts for, while nothing is known
LEAST_WEIGHT = 2.0
MOST_WEIGHT = 400.0
WINDOW_TESTS = 32  # of one sequence, that make a record: fewer lie within one passage
_FEWEST_TESTS = 8
_LEAST_VARIANCE = 1e-3  # of a test: no draft is sure
_PAIRS = 96
_EVERY = 8  # pairs between two estimates
_PAIRS_NEEDED = 12


@dataclass(frozen=True, slots=True)
class Record:
    """Some of a sequence's tests: how far they are from what all are expected to have."""

    away: float  # in deviations of as many tests that are independent
    tested: int

    @classmethod
    def of(cls, agreed: float, tested: int, expected: float) -> Record:
        """`agreed` of `tested` draft tokens, where all sequences have `expected`."""
        chance = tested * max(expected * (1.0 - expected), _LEAST_VARIANCE)
        return cls((agreed - expected * tested) / chance**0.5, tested)


@dataclass(slots=True)
class Spread:
    """Of one proposer's drafts. `weight` is the prior's, in tests."""

    weight: float = FIRST_WEIGHT
    _pairs: deque[tuple[Record, Record]] = field(default_factory=lambda: deque(maxlen=_PAIRS))
    _new: int = 0

    @classmethod
    def restored(cls, weight: float) -> Spread:
        """With what was learned before. Raises `ValueError` for what no spread has learned."""
        if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
            raise ValueError(f"the rate of all cannot count for {weight} tests")
        return cls(weight)

    def add(self, earlier: Record, later: Record) -> None:
        """Two records of one sequence, one behind the other."""
        if min(earlier.tested, later.tested) < _FEWEST_TESTS:
            return
        self._pairs.append((earlier, later))
        self._new += 1
        if self._new >= _EVERY and len(self._pairs) >= _PAIRS_NEEDED:
            self._new = 0
            self._estimate()

    def _estimate(self) -> None:
        count = len(self._pairs)
        # Around their own means: the rate of all may have been another when it was asked.
        before, behind = (fmean(pair[i].away for pair in self._pairs) for i in (0, 1))
        away = [(one.away - before, two.away - behind) for one, two in self._pairs]
        together = sum(one * two for one, two in away)
        alone = sum(one * one + two * two for one, two in away) / 2.0
        tested = sum(one.tested + two.tested for one, two in self._pairs) / (2.0 * count)
        # A record of so many tests is believed as tests / (tests + weight).
        wanted = MOST_WEIGHT if together <= 0.0 else tested * (alone / together - 1.0)
        self.weight = min(max(wanted, LEAST_WEIGHT), MOST_WEIGHT)


@dataclass(slots=True)
class Own:
    """One sequence's record of one proposer's drafts."""

    faded: Acceptance = field(default_factory=Acceptance)
    agreed: int = 0  # since the last record
    tested: int = 0
    last: Record | None = None

    def observe(self, proposed: int, accepted: int) -> bool:
        """A verdict on a draft; True: the record is long enough to be closed."""
        self.faded.observe(proposed, accepted)
        self.agreed += accepted
        self.tested += accepted + (accepted < proposed)
        return self.tested >= WINDOW_TESTS

    def close(self, expected: float, spread: Spread) -> None:
        """The record is over; drafts of all sequences are accepted at `expected`."""
        record = Record.of(self.agreed, self.tested, expected)
        if self.last is not None:
            spread.add(self.last, record)
        self.last = record
        self.agreed = self.tested = 0

    def rate(self, expected: float, spread: Spread) -> float:
        """The sequence's acceptance, with that of all as the prior."""
        self.faded.weight = spread.weight
        return self.faded.rate_given(expected)
