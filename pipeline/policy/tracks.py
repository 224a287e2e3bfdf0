"""How drafts fare, from the general to the particular: each level is the prior of the next.

    proposer and grade  →  the same on one job  →  the same on one tag's rows of it

A sequence's own estimate, kept by whoever drafts, takes a track's rate as its prior.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specbatch.pipeline.policy.acceptance import Acceptance

LEVEL_DECAY = 0.995  # over all sequences: about the last two hundred tests count
LEVEL_WEIGHT = 12.0  # tests that the level above counts for
FRESH_TESTS = 16  # on a job, before what happened on others may speak against a source
FRESH_RATE = 0.6
_TRIED_ENOUGH = 64  # tests on a job
_SOFT_TESTS = 4.0  # that all grades of a proposer count for after its rest
_PRIMED_TESTS = 200.0  # what an earlier night may count for


def label_of(proposer: str, grade: int) -> str:
    """What a proposer's drafts of one grade are kept under; grade 0 is the proposer's name."""
    return f"{proposer}:{grade}" if grade else proposer


def proposer_of(label: str) -> str:
    return label.partition(":")[0]


def new_level(weight: float = LEVEL_WEIGHT) -> Acceptance:
    return Acceptance(decay=LEVEL_DECAY, weight=weight)


@dataclass(slots=True, eq=False)
class Track:
    """One label on one job and tag. Observations wait in a tally until `settle`."""

    levels: tuple[Acceptance, ...]  # the most general first
    tallied: list[Track] = field(default_factory=list)  # whoever has a tally; shared by all tracks
    agreed: int = 0  # of the tally
    tested: int = 0
    new_agreed: int = 0  # since `Tracks.counts` last told
    new_tested: int = 0

    @property
    def rate(self) -> float:
        """Probability that the next draft token is accepted, given that all before it were."""
        rate = self.levels[0].rate
        if self.levels[1].seen < FRESH_TESTS:
            rate = max(rate, FRESH_RATE)  # what failed on other jobs may fit this one
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
        return 0.0 if tested >= _TRIED_ENOUGH else 0.5 / (1.0 + tested) ** 0.5

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

    def settle(self) -> None:
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
    _tallied: list[Track] = field(default_factory=list)  # since `settle`: steps ask these alone

    def track(self, label: str, job: str, tag: str | None) -> Track:
        key = (label, job, tag)
        found = self._tracks.get(key)
        if found is None:
            levels = [
                self.known.setdefault(label, new_level(4.0)),
                self._jobs.setdefault((label, job), new_level()),
            ]
            if tag is not None:
                levels.append(self._tags.setdefault((label, job, tag), new_level()))
            found = self._tracks[key] = Track(tuple(levels), self._tallied)
        return found

    def prime(self, job: str, label: str, tag: str | None, agreed: float, tested: float) -> None:
        """What earlier nights of the job found, before anything was seen tonight."""
        if tested <= 0:
            return
        share = min(1.0, _PRIMED_TESTS / tested)
        levels = [self._jobs.setdefault((label, job), new_level())]
        if tag is not None:
            levels.append(self._tags.setdefault((label, job, tag), new_level()))
        for level in levels:
            level.agreed += share * agreed
            level.tested += share * tested
            level.seen += tested

    def settle(self) -> None:
        for track in self._tallied:
            track.settle()
        self._tallied.clear()

    def surprised(self) -> bool:
        return any(track.surprises for track in self._tallied)

    def rate_of(self, proposer: str, job: str) -> tuple[float, float]:
        """(acceptance, tests) of a proposer's drafts on a job, all grades and tags together."""
        levels = [
            level
            for (label, of), level in self._jobs.items()
            if of == job and proposer_of(label) == proposer
        ]
        tested = sum(level.tested for level in levels)
        agreed = sum(level.agreed for level in levels)
        return (agreed / tested if tested else 0.0), tested

    def of_proposer(self, proposer: str) -> list[Track]:
        return [t for (label, _, _), t in self._tracks.items() if proposer_of(label) == proposer]

    def soften(self, proposer: str, job: str) -> None:
        """Trust what was found on the job, and on each tag of it, no more than a few tests, all
        grades together: it may be another now."""
        by_tag: dict[tuple[str, ...], list[Acceptance]] = {}  # of the job itself: by nothing
        for (label, of, *tag), level in (*self._jobs.items(), *self._tags.items()):
            if of == job and proposer_of(label) == proposer:
                by_tag.setdefault(tuple(tag), []).append(level)
        for levels in by_tag.values():
            share = _SOFT_TESTS / max(_SOFT_TESTS, sum(level.tested for level in levels))
            for level in levels:
                level.agreed *= share
                level.tested *= share

    def counts(self, job: str) -> list[tuple[str, str | None, int, int]]:
        """(label, tag, agreed, tested) since this was last asked."""
        told = []
        for (label, of, tag), track in self._tracks.items():
            if of != job:
                continue
            track.settle()
            if track.new_tested:
                told.append((label, tag, track.new_agreed, track.new_tested))
                track.new_agreed = track.new_tested = 0
        return told

    def forget(self, job: str) -> None:
        self._jobs = {k: v for k, v in self._jobs.items() if k[1] != job}
        self._tags = {k: v for k, v in self._tags.items() if k[1] != job}
        self._tracks = {k: v for k, v in self._tracks.items() if k[1] != job}
