"""How likely the verifier is to accept the next draft token, from the general to the particular.

    proposer and confidence bucket  →  the same on one job  →  the same on rows of one tag of it

Each level is a decayed Beta estimate and the prior of the next; a track is one path through them. A
sequence's own record takes its track's rate as the prior, and counts as far as records of the same
proposer's sequences predict each other.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean

from specbatch.pipeline.policy import tuning


@dataclass(slots=True)
class Acceptance:
    """Probability that one draft token is accepted, given that all before it were.

    `tested` counts the draft tokens that were verified: the accepted ones and the first rejected
    one, never those behind it. Older evidence fades by `decay` per test. The prior counts as
    `weight` tests; it may be better known later, so it is given when asked.
    """

    prior: float = 0.6
    weight: float = 4.0
    decay: float = 0.97
    agreed: float = 0.0
    tested: float = 0.0
    seen: float = 0.0  # tests in all, without fading

    @property
    def rate(self) -> float:
        return self.rate_given(self.prior)

    def rate_given(self, prior: float) -> float:
        """The estimate under another prior."""
        return (self.agreed + prior * self.weight) / (self.tested + self.weight)

    def observe(self, proposed: int, accepted: int) -> None:
        """`accepted` of `proposed` draft tokens agreed, then one did not (if any was left)."""
        tested = accepted + (accepted < proposed)
        if tested:
            self.observe_many(accepted, tested)

    def observe_many(self, accepted: int, tested: int) -> None:
        """The same for several blocks at once: `tested` tokens were verified.

        They fade among themselves too, as if they had come one by one in no order: however many
        come at once, no more than `1 / (1 - decay)` tests ever count.
        """
        self.seen += tested
        fade = self.decay**tested
        share = (1.0 - fade) / (tested * (1.0 - self.decay)) if self.decay < 1.0 else 1.0
        self.agreed = self.agreed * fade + accepted * share
        self.tested = self.tested * fade + tested * share


# --- tracks: job and tag ---------------------------------------------------------------------


def label_of(proposer: str, bucket: int) -> str:
    """What a proposer's drafts of a confidence bucket are kept under; of bucket 0 its name."""
    return f"{proposer}:{bucket}" if bucket else proposer


def proposer_of(label: str) -> str:
    return label.partition(":")[0]


def new_level(weight: float = tuning.LEVEL_WEIGHT) -> Acceptance:
    return Acceptance(decay=tuning.LEVEL_DECAY, weight=weight)


@dataclass(slots=True, eq=False)
class Track:
    """One label on one job and tag. Observations wait in a tally until `fold`."""

    levels: tuple[Acceptance, ...]  # the most general first
    tallied: list[Track] = field(default_factory=list)  # whoever has a tally; shared by all tracks
    whole: Acceptance = field(default_factory=new_level)  # its proposer's on the tag, all labels
    agreed: int = 0  # of the tally
    tested: int = 0
    new_agreed: int = 0  # since `Tracks.counts` was last asked
    new_tested: int = 0

    @property
    def rate(self) -> float:
        """Probability that the next draft token is accepted, given that all before it were."""
        rate = self.levels[0].rate
        if self.levels[1].seen < tuning.FRESH_TESTS:
            rate = max(rate, tuning.FRESH_RATE)  # what failed on other jobs may fit this one
        for level in self.levels[1:]:
            rate = level.rate_given(rate)
        return rate

    @property
    def sure(self) -> float:
        """Tests that the rate rests on; those of a more general level count as its prior does."""
        sure = self.levels[0].weight + self.levels[0].tested
        for level in self.levels[1:]:
            sure = min(level.weight, sure) + level.tested
        return sure + self.tested

    @property
    def doubt(self) -> float:
        """How much better than its rate it may well be: nothing, once it was tried often enough.

        A source whose first drafts were unlucky would never be asked again otherwise.
        """
        tested = self.levels[1].seen + self.tested
        return 0.0 if tested >= tuning.OPTIMISM_TESTS else 0.5 / (1.0 + tested) ** 0.5

    @property
    def judged(self) -> float:
        """Tests on this job's rows, older ones faded."""
        return self.levels[-1].tested + self.tested

    def observe(self, proposed: int, accepted: int) -> None:
        """`accepted` of `proposed` draft tokens agreed, then one did not (if any was left)."""
        tested = accepted + (accepted < proposed)
        if tested and not self.tested:
            self.tallied.append(self)
        self.agreed += accepted
        self.tested += tested

    @property
    def surprises(self) -> bool:
        """Whether the tally is far below what was expected of it: three deviations."""
        if self.tested < 16:
            return False
        rate = self.rate
        expected = rate * self.tested
        return bool(self.agreed < expected - 3.0 * (expected * (1.0 - rate) + 0.25) ** 0.5)

    def fold(self) -> None:
        """Put the tally into the estimates."""
        if not self.tested:
            return
        for level in self.levels:
            level.observe_many(self.agreed, self.tested)
        self.new_agreed += self.agreed
        self.new_tested += self.tested
        self.agreed = self.tested = 0


@dataclass(slots=True)
class Tracks:
    """All of them. `known` is the general level by label, kept from job to job."""

    known: dict[str, Acceptance]
    _jobs: dict[tuple[str, str], Acceptance] = field(default_factory=dict)  # (label, job)
    _tags: dict[tuple[str, str, str], Acceptance] = field(default_factory=dict)
    _tracks: dict[tuple[str, str, str | None], Track] = field(default_factory=dict)
    # By (proposer, job, tag): the newest tests of all labels, whichever these are by now.
    _wholes: dict[tuple[str, str, str | None], Acceptance] = field(default_factory=dict)
    _tallied: list[Track] = field(default_factory=list)  # since `fold`: steps ask these alone

    def track(self, label: str, job: str, tag: str | None) -> Track:
        key = (label, job, tag)
        found = self._tracks.get(key)
        if found is None:
            general = self.known.setdefault(label, new_level(4.0))
            levels = (general, *self._levels(label, job, tag))
            whole = self._whole(proposer_of(label), job, tag)
            found = self._tracks[key] = Track(levels, self._tallied, whole)
        return found

    def _whole(self, proposer: str, job: str, tag: str | None) -> Acceptance:
        return self._wholes.setdefault((proposer, job, tag), new_level())

    def _levels(self, label: str, job: str, tag: str | None) -> list[Acceptance]:
        """Of the job, and of the tag if there is one."""
        levels = [self._jobs.setdefault((label, job), new_level())]
        if tag is not None:
            levels.append(self._tags.setdefault((label, job, tag), new_level()))
        return levels

    def prime(self, job: str, label: str, tag: str | None, agreed: float, tested: float) -> None:
        """What earlier jobs of the same name found, before anything is known of this one."""
        if tested <= 0:
            return
        share = min(1.0, tuning.PRIOR_TESTS / tested)
        for level in (*self._levels(label, job, tag), self._whole(proposer_of(label), job, tag)):
            level.agreed += share * agreed
            level.tested += share * tested
            level.seen += tested

    def fold(self) -> None:
        tallies: dict[int, tuple[Acceptance, list[Track]]] = {}  # by identity of the whole
        for track in self._tallied:
            tallies.setdefault(id(track.whole), (track.whole, []))[1].append(track)
        for whole, tracks in tallies.values():  # at once: the last of them must not count most
            tested = sum(track.tested for track in tracks)
            if tested:
                whole.observe_many(sum(track.agreed for track in tracks), tested)
        for track in self._tallied:
            track.fold()
        self._tallied.clear()

    def surprised(self) -> bool:
        return any(track.surprises for track in self._tallied)

    def rate_of(self, proposer: str, job: str) -> tuple[float, float]:
        """(acceptance, tests) of a proposer's drafts on a job, all buckets and tags together."""
        levels = [
            level
            for (label, of), level in self._jobs.items()
            if of == job and proposer_of(label) == proposer
        ]
        tested = sum(level.tested for level in levels)
        agreed = sum(level.agreed for level in levels)
        return (agreed / tested if tested else 0.0), tested

    def lately(self, proposer: str, job: str) -> dict[str | None, tuple[float, float]]:
        """(acceptance, tests) of the newest drafts, by tag. `rate_of` keeps what is known of
        buckets and tags for which nothing is drafted any more."""
        return {
            tag: (whole.agreed / whole.tested, whole.tested)
            for (name, of, tag), whole in self._wholes.items()
            if (name, of) == (proposer, job) and whole.tested
        }

    def of_proposer(self, proposer: str) -> list[Track]:
        return [t for (label, _, _), t in self._tracks.items() if proposer_of(label) == proposer]

    def soften(self, proposer: str, job: str) -> None:
        """Trust what was found on the job, and on each tag of it, no more than a few tests, all
        buckets together: it may be another now."""
        by_tag: dict[tuple[str, ...], list[Acceptance]] = {}  # of the job itself: by nothing
        for (label, of, *tag), level in (*self._jobs.items(), *self._tags.items()):
            if of == job and proposer_of(label) == proposer:
                by_tag.setdefault(tuple(tag), []).append(level)
        for levels in by_tag.values():
            share = tuning.HALF_OPEN_TESTS / max(
                tuning.HALF_OPEN_TESTS, sum(level.tested for level in levels)
            )
            for level in levels:
                level.agreed *= share
                level.tested *= share

    def counts(self, job: str) -> list[tuple[str, str | None, int, int]]:
        """(label, tag, agreed, tested) since this was last asked."""
        found = []
        for (label, of, tag), track in self._tracks.items():
            if of != job:
                continue
            track.fold()
            if track.new_tested:
                found.append((label, tag, track.new_agreed, track.new_tested))
                track.new_agreed = track.new_tested = 0
        return found

    def forget(self, job: str) -> None:
        self._jobs = {k: v for k, v in self._jobs.items() if k[1] != job}
        self._tags = {k: v for k, v in self._tags.items() if k[1] != job}
        self._tracks = {k: v for k, v in self._tracks.items() if k[1] != job}
        self._wholes = {k: v for k, v in self._wholes.items() if k[1] != job}


# --- sequences ----------------------------------------------------------------------------------
# A record of thirty tests says little: at an acceptance of 0.9 it errs by 0.05, which is the
# difference between eight draft tokens and sixteen. Where sequences are alike the rate of all is
# the better guess for each; where they differ, their own is. How far records lie apart does not
# answer that: easy and hard passages take turns within a text and make records differ by more than
# chance, while none of them predicts the next. What counts is how far a sequence's next record
# follows its last one: the slope of a regression, which is the credibility that a record deserves
# (Bühlmann, ASTIN Bulletin 4, 1967). Distances are counted in standard deviations of chance, since
# jobs and confidence buckets of one proposer have acceptances far apart.


@dataclass(frozen=True, slots=True)
class Record:
    """Some of a sequence's tests: how far they are from what all are expected to have."""

    away: float  # in deviations of as many tests that are independent
    tested: int

    @classmethod
    def of(cls, agreed: float, tested: int, expected: float) -> Record:
        """`agreed` of `tested` draft tokens, where all sequences have `expected`."""
        chance = tested * max(expected * (1.0 - expected), tuning.LEAST_VARIANCE)
        return cls((agreed - expected * tested) / chance**0.5, tested)


@dataclass(slots=True)
class Spread:
    """Of one proposer's drafts. `weight` is the prior's, in tests."""

    weight: float = tuning.SEQUENCE_WEIGHT
    _pairs: deque[tuple[Record, Record]] = field(
        default_factory=lambda: deque(maxlen=tuning.RECORD_PAIRS)
    )
    _new: int = 0

    @classmethod
    def restored(cls, weight: float) -> Spread:
        """With what was learned before. Raises `ValueError` for what no spread has learned."""
        if not tuning.LEAST_SEQUENCE_WEIGHT <= weight <= tuning.MOST_SEQUENCE_WEIGHT:
            raise ValueError(f"the rate of all cannot count for {weight} tests")
        return cls(weight)

    def add(self, earlier: Record, later: Record) -> None:
        """Two records of one sequence, one behind the other."""
        if min(earlier.tested, later.tested) < tuning.LEAST_RECORD_TESTS:
            return
        self._pairs.append((earlier, later))
        self._new += 1
        if (
            self._new >= tuning.ESTIMATE_EVERY_PAIRS
            and len(self._pairs) >= tuning.LEAST_RECORD_PAIRS
        ):
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
        weight = (
            tuning.MOST_SEQUENCE_WEIGHT if together <= 0.0 else tested * (alone / together - 1.0)
        )
        self.weight = min(max(weight, tuning.LEAST_SEQUENCE_WEIGHT), tuning.MOST_SEQUENCE_WEIGHT)


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
        return self.tested >= tuning.RECORD_TESTS

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
