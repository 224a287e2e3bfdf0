"""What is learned and decided about drafting, job by job, until somebody asks for it.

A decision is told when it is new: a job that goes on as before adds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from specbatch.pipeline.policy.acceptance import Acceptance
from specbatch.pipeline.policy.breaker import Breaker
from specbatch.pipeline.policy.costs.controls import NOTHING_MEASURED, Measured
from specbatch.pipeline.policy.tracks import Track, Tracks, label_of
from specbatch.schemas.speculation import (
    ALL_PROPOSERS,
    AcceptanceCount,
    Decision,
    DecisionAction,
)

JUDGED_TESTS = 24  # on a job, before a proposer is taken out of it
SAME_TESTS_STEPS = 128  # for which looks at the same tests are one: trials are rarer than looks
SETTLED_LOOKS = 2  # behind one another, before a turn to or from depth 0 is told
MOST_DECISIONS = 200  # of a job, kept until they are asked for
MOST_JOBS = 64


@dataclass(frozen=True, slots=True)
class Lessons:
    """What one job taught since it was last asked."""

    counts: tuple[AcceptanceCount, ...] = ()
    decisions: tuple[Decision, ...] = ()
    measured: Measured = NOTHING_MEASURED  # of its steps, at depth 0 and with drafts


@dataclass(slots=True)
class _Routed:
    told: str | None = None  # the draft model
    looks: int = 0  # behind one another that say otherwise


@dataclass(slots=True)
class _Job:
    breakers: dict[str, Breaker] = field(default_factory=dict)  # by proposer
    judged: dict[str, tuple[tuple[float, float], int]] = field(default_factory=dict)
    # by proposer: the figures of the last look that counted, and its step
    drafting: bool | None = None  # as told last
    looks: int = 0  # behind one another that say otherwise
    routes: dict[str | None, _Routed] = field(default_factory=dict)  # by tag
    decisions: list[Decision] = field(default_factory=list)


@dataclass(slots=True)
class Journal:
    """All jobs of one engine. `known` is kept from job to job."""

    known: dict[str, Acceptance]
    clock: Callable[[], float] = time.time
    # Hears job, proposer (or `ALL_PROPOSERS`), and whether it is off from now on.
    on_turn: Callable[[str, str, bool], None] = lambda *_: None
    tracks: Tracks = field(init=False)
    _jobs: dict[str, _Job] = field(default_factory=dict)  # the one used last comes last

    def __post_init__(self) -> None:
        self.tracks = Tracks(self.known)

    def track(self, proposer: str, grade: int, job: str, tag: str | None) -> Track:
        return self.tracks.track(label_of(proposer, grade), job, tag)

    def prime(self, job: str, counts: Iterable[AcceptanceCount]) -> None:
        """What earlier nights of the job found."""
        is_known = job in self._jobs
        self._job(job)
        for count in () if is_known else counts:
            self.tracks.prime(job, count.proposer, count.tag, count.agreed, count.tested)

    # --- may a proposer be asked? ---------------------------------------------------------------
    def allows(self, job: str, proposer: str, step: int) -> bool:
        of = self._jobs.get(job)
        breaker = of.breakers.get(proposer) if of else None
        if breaker is None or breaker.out_until is None:
            return True
        if not breaker.wakes(step):
            return False
        self.on_turn(job, proposer, False)
        rate, tested = self.tracks.rate_of(proposer, job)
        self.tracks.soften(proposer, job)
        self._note(
            job,
            DecisionAction.TRIED_AGAIN,
            proposer,
            f"{proposer} has rested and is tried again on a few sequences",
            acceptance=rate if tested else None,
        )
        return True

    def judge(
        self,
        job: str,
        proposer: str,
        step: int,
        pays: bool,
        break_even: Callable[[], float],
        sequences: int,
        believed: float | None = None,
        rival: tuple[str, float] | None = None,
    ) -> None:
        """One look's verdict: did any of the job's drafts by `proposer` pay?

        `believed` is the acceptance it rests on, where that is not what was measured over the job:
        what is known of the sequences that are there. `rival`: see `verdict`. Neither hopes nor a
        handful of tests decide anything, and looks at the same tests count as one for a while.
        """
        of = self._job(job)
        rate, tested = self.tracks.rate_of(proposer, job)
        if tested < JUDGED_TESTS:
            return
        figures, at = of.judged.get(proposer, (None, 0))
        if not pays and figures == (rate, tested) and step < at + SAME_TESTS_STEPS:
            return
        of.judged[proposer] = (rate, tested), step
        action = of.breakers.setdefault(proposer, Breaker()).judge(step, pays)
        if action is None:
            return
        self.on_turn(job, proposer, action is DecisionAction.TAKEN_OUT)
        needed = break_even()
        rate = rate if believed is None else believed
        self._note(
            job,
            action,
            proposer,
            verdict(proposer, rate, tested, needed, sequences, pays, rival),
            acceptance=rate,
            break_even=needed,
            sequences=sequences,
        )

    def rests(self, proposer: str, reason: str) -> None:
        """The proposer failed too often and is not asked by anybody for a while."""
        for job in tuple(self._jobs):
            self._note(job, DecisionAction.TAKEN_OUT, proposer, reason)

    def turned(self, job: str, drafting: bool, reason: Callable[[], str], sequences: int) -> None:
        """A look's choice for the job's sequences; told once it stands."""
        of = self._job(job)
        if of.drafting == drafting:
            of.looks = 0
            return
        of.looks += 1
        if of.looks < SETTLED_LOOKS and of.drafting is not None:
            return
        of.drafting, of.looks = drafting, 0
        self.on_turn(job, ALL_PROPOSERS, not drafting)
        action = DecisionAction.ON if drafting else DecisionAction.OFF
        self._note(job, action, ALL_PROPOSERS, reason(), sequences=sequences)

    def routed(
        self, job: str, tag: str | None, model: str, reason: Callable[[], str], sequences: int
    ) -> None:
        """A look's draft model, of several, for the rows of a tag; told once it stands."""
        route = self._job(job).routes.setdefault(tag, _Routed())
        if route.told == model:
            route.looks = 0
            return
        route.looks += 1
        if route.looks >= SETTLED_LOOKS:
            route.told, route.looks = model, 0
            self._note(job, DecisionAction.ROUTED, model, reason(), sequences=sequences)

    # --- what is handed out ---------------------------------------------------------------------
    def lessons(self, job: str) -> Lessons:
        """All that is new about a job."""
        if job not in self._jobs:
            return Lessons()
        of = self._job(job)
        decisions, of.decisions = tuple(of.decisions), []
        counts = self.tracks.counts(job)
        return Lessons(
            tuple(
                AcceptanceCount(label, tag, agreed, tested) for label, tag, agreed, tested in counts
            ),
            decisions,
        )

    def forget(self, job: str) -> None:
        """Drop all that is known of a job; what was off in it is told to be off no more."""
        of = self._jobs.pop(job, None) or _Job()
        self.tracks.forget(job)
        for proposer, breaker in of.breakers.items():
            if breaker.out_until is not None:
                self.on_turn(job, proposer, False)
        if of.drafting is False:
            self.on_turn(job, ALL_PROPOSERS, False)

    def _job(self, job: str) -> _Job:
        """Whoever asks for a job uses it: the one that was not used for longest makes room."""
        of = self._jobs.pop(job, None)
        if of is None:
            of = _Job()
            if len(self._jobs) >= MOST_JOBS:
                self.forget(next(iter(self._jobs)))
        self._jobs[job] = of
        return of

    def _note(
        self,
        job: str,
        action: DecisionAction,
        proposer: str,
        reason: str,
        acceptance: float | None = None,
        break_even: float | None = None,
        sequences: int = 0,
    ) -> None:
        decisions = self._job(job).decisions
        if len(decisions) < MOST_DECISIONS:
            decisions.append(
                Decision(self.clock(), action, proposer, reason, acceptance, break_even, sequences)
            )


def verdict(
    proposer: str,
    rate: float,
    tested: float,
    needed: float,
    sequences: int,
    pays: bool,
    rival: tuple[str, float] | None = None,
) -> str:
    """A sentence on whether a proposer's drafts pay, with the figures it rests on.

    `needed` is the acceptance from which on they would pay alone and for all sequences; `rival` is
    who drafts instead of it, and at which acceptance. What was chosen looks at each sequence, so it
    may be otherwise than the mean of them says: then the reason is another.
    """
    beside = f"with {sequences} sequences in a step"
    found = f"{proposer}'s drafts are accepted at {rate:.2f} (of the last {tested:.0f} looked at)"
    if pays and rate < needed:
        return f"{found}, and pay for those of the {sequences} sequences in a step that do better"
    if pays:
        return f"{found}, enough {beside}: from {needed:.2f} on they pay"
    if needed > 1.0:
        return f"{beside} no acceptance pays for what {proposer}'s drafts cost"
    if rate < needed:
        return f"{found}, too little {beside}: from {needed:.2f} on they pay"
    if rival is not None:
        other, of_other = rival
        return (
            f"{found}, which would pay alone {beside}, but {other}'s, accepted at {of_other:.2f}, "
            "bring more, and both together no more than these"
        )
    return f"{found}, which would pay if there were enough of them for all {sequences} sequences"
