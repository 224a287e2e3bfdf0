"""Disables proposers where their drafts do not pay, and records the decisions about drafting.

A decision is recorded when it is new: a job that continues as before adds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from specbatch.pipeline.policy import tuning
from specbatch.pipeline.policy.acceptance import Acceptance, Track, Tracks, label_of, proposer_of
from specbatch.pipeline.policy.costs.controls import NOTHING_MEASURED, Measured
from specbatch.schemas.draft_switches import DraftSwitch
from specbatch.schemas.speculation import (
    ALL_PROPOSERS,
    PRE_GENERATED,
    AcceptanceCount,
    Decision,
    DecisionAction,
)


@dataclass(slots=True)
class Breaker:
    """Of one proposer on one job. Steps are the engine's."""

    strikes: int = 0
    open_steps: int = tuning.FIRST_OPEN_STEPS
    open_until: int | None = None  # step; None: it takes part
    needed: float = 1.0  # acceptance from which on it would pay, as of when it was disabled
    probing: bool = False  # it takes part again, and has to show that it pays

    def half_opens(self, step: int) -> bool:
        """Whether its time has just run out, so that it is tried again; true once."""
        if self.open_until is None or step < self.open_until:
            return False
        self.open_until = None
        self.probing = True
        self.strikes = 0
        return True

    def record(self, step: int, pays: bool) -> DecisionAction | None:
        """A replan's verdict on its drafts; the action that follows, if any does."""
        if pays:
            self.strikes = 0
            if not self.probing:
                return None
            self.probing = False
            self.open_steps = tuning.FIRST_OPEN_STEPS
            return DecisionAction.ENABLED
        self.strikes += 1
        if self.strikes < tuning.STRIKES:
            return None
        self.open_until = step + self.open_steps
        self.open_steps = min(2 * self.open_steps, tuning.LONGEST_OPEN_STEPS)
        self.probing = False
        self.strikes = 0
        return DecisionAction.DISABLED


# --- decisions ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lessons:
    """What one job taught since it was last asked."""

    counts: tuple[AcceptanceCount, ...] = ()
    decisions: tuple[Decision, ...] = ()
    measured: Measured = NOTHING_MEASURED  # of its steps, at depth 0 and with drafts


@dataclass(slots=True)
class _Settled:
    """A choice of replans, as it was recorded last."""

    recorded: str | bool | None = None
    replans: int = 0  # in a row that say otherwise

    def turns(self, choice: str | bool, replans: int = tuning.SETTLED_REPLANS) -> bool:
        """A replan's choice; whether it is another one, as the last `replans` were."""
        self.replans = 0 if choice == self.recorded else self.replans + 1
        if not self.replans or self.replans < replans:
            return False
        self.recorded, self.replans = choice, 0
        return True


@dataclass(slots=True)
class _Height:
    """Of a proposer's acceptance on rows of one tag."""

    best: float = 0.0  # earlier jobs' too
    strikes: int = 0  # replans in a row that found it far below


@dataclass(slots=True)
class _Job:
    primed: set[str] = field(default_factory=set)  # proposers
    breakers: dict[str, Breaker] = field(default_factory=dict)  # by proposer
    heights: dict[tuple[str, str | None], _Height] = field(default_factory=dict)  # proposer, tag
    collapsed: dict[str, bool] = field(default_factory=dict)  # by proposer: far below its best
    judged: dict[str, tuple[tuple[float, float], int]] = field(default_factory=dict)
    # by proposer: the figures of the last replan that counted, and its step
    switched: list[DraftSwitch] = field(default_factory=list)  # off by an operator, as recorded
    drafting: _Settled = field(default_factory=_Settled)
    routes: dict[str | None, _Settled] = field(default_factory=dict)  # by tag
    decisions: list[Decision] = field(default_factory=list)


@dataclass(slots=True)
class DecisionLog:
    """All jobs of one engine. `known` is kept from job to job."""

    known: dict[str, Acceptance]
    clock: Callable[[], float] = time.time
    # Hears job, proposer (or `ALL_PROPOSERS`), and whether it is off from now on.
    on_decision: Callable[[str, str, bool], None] = lambda *_: None
    # Hears job, proposer, and whether its acceptance is far below its best from now on.
    on_collapse: Callable[[str, str, bool], None] = lambda *_: None
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # of models, by proposer
    tracks: Tracks = field(init=False)
    _jobs: dict[str, _Job] = field(default_factory=dict)  # the one used last comes last

    def __post_init__(self) -> None:
        self.tracks = Tracks(self.known)

    def track(self, proposer: str, bucket: int, job: str, tag: str | None) -> Track:
        return self.tracks.track(label_of(proposer, bucket), job, tag)

    def prime(self, job: str, counts: Iterable[AcceptanceCount]) -> None:
        """What earlier jobs of the same name found, proposer by proposer, once each.

        What was found with another model under a proposer's name says nothing of this one. Who
        wrote blocks ahead is for the caller to compare.
        """
        primed = self._job(job).primed
        proposers = set()
        for count in counts:
            proposer = proposer_of(count.proposer)
            ours = self.fingerprints.get(proposer, count.fingerprint)
            if proposer not in primed and (proposer == PRE_GENERATED or count.fingerprint == ours):
                self.tracks.prime(job, count.proposer, count.tag, count.agreed, count.tested)
                proposers.add(proposer)
        for proposer in proposers:
            primed.add(proposer)
            self._compare(job, proposer)

    # --- may a proposer be asked? ---------------------------------------------------------------
    def allows(self, job: str, proposer: str, step: int) -> bool:
        of = self._jobs.get(job)
        breaker = of.breakers.get(proposer) if of else None
        if breaker is None or breaker.open_until is None:
            return True
        if not breaker.half_opens(step):
            return False
        self.on_decision(job, proposer, False)
        rate, tested = self.tracks.rate_of(proposer, job)
        self.tracks.soften(proposer, job)
        self._note(
            job,
            DecisionAction.HALF_OPENED,
            proposer,
            f"{proposer} was disabled for a while and is tried again on a few sequences",
            acceptance=rate if tested else None,
        )
        return True

    def record_verdict(
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
        """A replan's verdict: did any of the job's drafts by `proposer` pay?

        `believed` is the acceptance it rests on, where that is not what was measured over the job:
        what is known of the sequences that are there. `rival`: see `verdict`. A handful of tests
        decides nothing, and replans at the same tests count as one for a while.
        """
        of = self._job(job)
        rate, tested = self.tracks.rate_of(proposer, job)
        if tested < tuning.BREAKER_TESTS:
            return
        figures, at = of.judged.get(proposer, (None, 0))
        if not pays and figures == (rate, tested) and step < at + tuning.SAME_TESTS_STEPS:
            return
        of.judged[proposer] = (rate, tested), step
        self._compare(job, proposer)
        action = of.breakers.setdefault(proposer, Breaker()).record(step, pays)
        if action is None:
            return
        self.on_decision(job, proposer, action is DecisionAction.DISABLED)
        needed = of.breakers[proposer].needed = break_even()
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

    def rests(self, job: str, proposer: str) -> bool:
        """Whether it is disabled on the job, so that nothing but samples in shadow tells of it."""
        of = self._jobs.get(job)
        breaker = of.breakers.get(proposer) if of else None
        return breaker is not None and breaker.open_until is not None

    def review(self, step: int) -> None:
        """What samples say of proposers that are disabled: whether acceptance is still far below
        its best, and who would pay by now, and so is tried again at once."""
        for job, of in tuple(self._jobs.items()):
            for proposer, breaker in of.breakers.items():
                figures = self.tracks.rate_of(proposer, job)
                old, _ = of.judged.get(proposer, (None, 0))
                if breaker.open_until is None or figures == old:
                    continue
                of.judged[proposer] = figures, step
                self._compare(job, proposer)
                rate, tested = figures
                if tested >= tuning.BREAKER_TESTS and rate >= breaker.needed:
                    breaker.open_until = min(step, breaker.open_until)

    def _compare(self, job: str, proposer: str) -> None:
        """With the best there was, tag by tag. What collapsed stays so while nothing is drafted,
        until samples say otherwise: no figure that rests on draft tokens would tell of it."""
        of = self._job(job)
        for tag, (rate, tested) in self.tracks.lately(proposer, job).items():
            if tested < tuning.BREAKER_TESTS:
                continue
            level = of.heights.setdefault((proposer, tag), _Height())
            level.best = max(rate, level.best)
            low = tuning.COLLAPSED_SHARE * level.best
            far_below = rate < low and rate < level.best - tuning.COLLAPSED_BY
            level.strikes = level.strikes + 1 if far_below else 0
        fell = any(
            level.strikes >= tuning.STRIKES
            for (name, _), level in of.heights.items()
            if name == proposer
        )
        if fell != of.collapsed.get(proposer):  # the first time it is told that all is well
            of.collapsed[proposer] = fell
            self.on_collapse(job, proposer, fell)

    def record_disabled(self, proposer: str, reason: str) -> None:
        """The proposer failed too often and is not asked by anybody for a while."""
        for job in tuple(self._jobs):
            self._note(job, DecisionAction.DISABLED, proposer, reason)

    def record_drafting(
        self, job: str, drafting: bool, reason: Callable[[], str], sequences: int
    ) -> None:
        """A replan's choice for the job's sequences, recorded once it is settled."""
        of = self._job(job).drafting
        if not of.turns(drafting, 1 if of.recorded is None else tuning.SETTLED_REPLANS):
            return
        self.on_decision(job, ALL_PROPOSERS, not drafting)
        action = DecisionAction.ON if drafting else DecisionAction.OFF
        self._note(job, action, ALL_PROPOSERS, reason(), sequences=sequences)

    def record_route(
        self, job: str, tag: str | None, model: str, reason: Callable[[], str], sequences: int
    ) -> None:
        """A replan's draft model for the rows of a tag, recorded once it is settled."""
        if self._job(job).routes.setdefault(tag, _Settled()).turns(model):
            self._note(job, DecisionAction.ROUTED, model, reason(), sequences=sequences)

    # --- what an operator has switched off ------------------------------------------------------
    def record_switched_off(
        self, job: str, by: Mapping[str, DraftSwitch], everything: bool
    ) -> None:
        """`by`: the switch of each proposer that is off for rows of the job. `everything`: all are.

        What the engine had found about them by itself is no reason for an alert any more: a
        decision took its place. They start afresh when they are switched on.
        """
        of = self._job(job)
        for switch in dict.fromkeys(by.values()):
            if switch not in of.switched:
                of.switched.append(switch)
                reason = f"switched off by {switch.off_by}: {switch.reason}"
                whom = switch.scope.proposer or ALL_PROPOSERS
                self._note(job, DecisionAction.SWITCHED_OFF, whom, reason)
        whole = [name for name, switch in by.items() if not switch.scope.tag]
        for proposer in whole:
            self._rest(job, of, proposer)
        if everything and len(whole) == len(by):
            if of.drafting.recorded is False:
                self.on_decision(job, ALL_PROPOSERS, False)
            of.drafting = _Settled()

    def _rest(self, job: str, of: _Job, proposer: str) -> None:
        breaker = of.breakers.pop(proposer, None)
        if breaker is not None and breaker.open_until is not None:
            self.on_decision(job, proposer, False)
        if of.collapsed.get(proposer):
            of.collapsed[proposer] = False
            self.on_collapse(job, proposer, False)
        for (name, _), level in of.heights.items():
            if name == proposer:
                level.strikes = 0

    def record_switched_on(self, active: Collection[DraftSwitch]) -> None:
        """`active`: what is still switched off."""
        for job, of in tuple(self._jobs.items()):
            for switch in [s for s in of.switched if s not in active]:
                of.switched.remove(switch)
                reason = f"{switch.off_by} had switched it off: {switch.reason}"
                whom = switch.scope.proposer or ALL_PROPOSERS
                self._note(job, DecisionAction.SWITCHED_ON, whom, reason)

    # --- what is handed out ---------------------------------------------------------------------
    def lessons(self, job: str) -> Lessons:
        """All that is new about a job."""
        if job not in self._jobs:
            return Lessons()
        of = self._job(job)
        decisions, of.decisions = tuple(of.decisions), []
        counts = tuple(
            AcceptanceCount(
                label, tag, agreed, tested, self.fingerprints.get(proposer_of(label), "")
            )
            for label, tag, agreed, tested in self.tracks.counts(job)
        )
        return Lessons(counts, decisions)

    def forget(self, job: str) -> None:
        """Drop all that is known of a job; whatever was off in it is reported as on again."""
        of = self._jobs.pop(job, None) or _Job()
        self.tracks.forget(job)
        for proposer, fell in of.collapsed.items():
            if fell:
                self.on_collapse(job, proposer, False)
        for proposer, breaker in of.breakers.items():
            if breaker.open_until is not None:
                self.on_decision(job, proposer, False)
        if of.drafting.recorded is False:
            self.on_decision(job, ALL_PROPOSERS, False)

    def _job(self, job: str) -> _Job:
        """Whoever asks for a job uses it: the one that was not used for longest makes room."""
        of = self._jobs.pop(job, None)
        if of is None:
            of = _Job()
            if len(self._jobs) >= tuning.MOST_JOBS:
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
        if len(decisions) < tuning.MOST_DECISIONS:
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
    """A sentence on whether a proposer's drafts pay, with the figures behind it.

    `needed` is the acceptance from which on they would pay alone and for all sequences; `rival` is
    who drafts instead of it, and at which acceptance. The choice weighs each sequence apart, so it
    may differ from what their mean says: then the reason is another.
    """
    at = f"at {sequences} sequences"
    found = f"{proposer}: acceptance {rate:.2f} over the last {tested:.0f} tested tokens"
    if not pays and needed > 1.0:
        return f"no acceptance pays for what drafts of {proposer} cost {at}"
    if pays and rate < needed:
        return f"{found}; it pays for those of the {sequences} sequences in a step that do better"
    if pays or rate < needed:
        return f"{found}; break-even {at} is {needed:.2f}"
    if rival is not None:
        other, of_other = rival
        return (
            f"{found}; it would pay alone {at}, but {other}, with acceptance {of_other:.2f}, "
            "brings more, and both together no more than that"
        )
    return f"{found}; it would pay if all {sequences} sequences in a step had such drafts"
