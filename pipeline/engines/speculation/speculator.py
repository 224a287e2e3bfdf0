"""Chooses who drafts for each sequence, and how far.

Looking at all sequences and prices takes longer than a small model's step, so a choice stands for
some steps. In between, sequences that arrive are drafted for like the others on average, and free
drafts that turn up take the place of what was chosen where they are better.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from specbatch.pipeline.engines.contract import Cohort
from specbatch.pipeline.engines.models.draft_names import DRAFT_MODEL, kind_of
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.speculation.options import (
    Choice,
    Option,
    candidates,
    choices,
    depth_worth,
    record_decisions,
    usual,
)
from specbatch.pipeline.engines.speculation.pairs import AT_ONCE, Pair, Pairs
from specbatch.pipeline.engines.speculation.router import Router
from specbatch.pipeline.engines.speculation.shadow import DEPTH as SHADOW_DEPTH
from specbatch.pipeline.engines.speculation.shadow import DEPTH_AT_REST, Shadow
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.engines.state.step import NO_DRAFT, Draft, DraftPlan
from specbatch.pipeline.policy import tuning
from specbatch.pipeline.policy.acceptance import Own, Track
from specbatch.pipeline.policy.breaker import DecisionLog
from specbatch.pipeline.policy.costs.controls import Arm
from specbatch.pipeline.policy.depth import Controller, DepthSchedule
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.schemas.draft_switches import ALL_ON, DraftSwitches, RowScope
from specbatch.schemas.records import Verification

MOST_SCOPES = 1024  # of rows, of which it is kept what is switched off


@dataclass(slots=True)
class _Selection:
    """What a replan decided, until the next one."""

    until: int  # step
    sequences: int
    at_depth_0: bool = True
    opening_until: int = 0  # step; other choices are tried until then
    opening: dict[Sequence, Choice] = field(default_factory=dict)
    choices: dict[Sequence, Choice] = field(default_factory=dict)
    newcomers: dict[Cohort, Choice] = field(default_factory=dict)  # for those who were not there
    newcomer: Choice | None = None  # of a route that was not there either
    left: dict[Cohort, list[Choice]] = field(default_factory=dict)  # of those that ended meanwhile
    watched: tuple[Proposer, ...] = ()  # free sources that may turn up with something better …
    beats: float = 1.0  # … than this acceptance
    least_worth: float = 1.0  # of a draft token that is verified
    tried: set[Sequence] = field(default_factory=set)  # with a model that is not theirs


class Speculator:
    """Owns the proposers and what is known of them. Without proposers every depth is 0."""

    def __init__(
        self,
        proposers: Seq[Proposer],
        knowledge: Knowledge | None = None,
        coin: Callable[[], float] | None = None,
    ) -> None:
        """`coin` gives numbers in [0, 1) by which control steps are drawn; None: at random."""
        self.proposers = tuple(proposers)
        self.knowledge = knowledge or Knowledge()
        self.decision_log = DecisionLog(
            self.knowledge.acceptance,
            fingerprints={proposer.name: proposer.fingerprint for proposer in self.proposers},
        )
        self.steps = 0
        self._by_name = {proposer.name: proposer for proposer in self.proposers}
        for proposer in self.proposers:
            if proposer.pass_time is not None:
                self.knowledge.draft_times[proposer.name] = proposer.pass_time
        self._switches = ALL_ON
        self._off: dict[tuple[str, RowScope], frozenset[str]] = {}  # proposers, by job and scope
        self._controller = Controller(self.knowledge)
        self._router = Router(self.proposers, self._controller, self._track)
        self._selection = _Selection(0, 0)
        self._shadow = Shadow()
        self._pairs = Pairs()
        self._at_rest = Shadow(tells_completions=False)
        self._counts = False  # this step: somebody asks for drafts, so it counts
        self._opens = False  # this step: something is tried
        self._pauses = True  # this step: nothing is drafted but at fixed depths
        self._coin = coin or random.Random().random
        self._odds = 0.0  # to draft, by those of being a control, when a coin was last thrown
        self._settling = 0  # steps until the control
        self._pairing = False  # some sequences have a candidate
        self._shadowing = False  # some sequences ask to be drafted for in shadow
        self._samples = 0  # drafts in shadow while drafting rested …
        self._sample_at = 0.0  # … and when there may be one more, by `perf_counter`
        self._own: dict[Sequence, dict[str, Own]] = {}  # by proposer
        self._tracks: dict[Sequence, Track] = {}  # of the draft that is being verified
        self._control_every = tuning.FIRST_CONTROL_EVERY
        self._control_passes = 1  # that a control makes in one call
        self._replans = 0

    def propose(
        self,
        deciding: Seq[Sequence],
        room: Callable[[Sequence, int], int],
        busy_sec: float = 0.0,
    ) -> DraftPlan:
        """A draft for every deciding sequence, most of them empty at depth 0.

        `room(sequence, wanted)` says how many draft tokens there are KV blocks for. `busy_sec`:
        what all steps so far took, of which candidates may have their share.
        """
        nothing = [NO_DRAFT] * len(deciding)
        asking = any(
            (s.request.depth != 0 or s.request.shadow or s.request.candidate in self._by_name)
            and len(self._switched_off(s)) < len(self.proposers)
            for s in deciding
        )
        self._counts = bool(self.proposers and asking)
        if not self._counts:
            self._settling = 0
            return DraftPlan(nothing, multi_step=True)
        self.steps += 1
        drafting_sec = replanning_sec = 0.0
        if replans := self._must_replan(len(deciding)):
            self._settling = 0
            begun = time.perf_counter()
            self._replan(deciding)
            replanning_sec = time.perf_counter() - begun
            self._controller.replanned(replanning_sec)
        if self._shadowing:
            drafting_sec = self._draft_in_shadow(deciding)
        if self._pairing:
            drafting_sec += self._draft_in_pairs(deciding, busy_sec)
        if self._selection.at_depth_0 or not self._at_rest.is_empty:
            drafting_sec += self._sample_at_rest(deciding)
        self._opens = self.steps < self._selection.opening_until
        arm = self._drawn(len(deciding), may_be_control=not replans)
        self._pauses = arm is not Arm.DRAFTS
        if any(sequence.request.depth for sequence in deciding):
            arm = Arm.APART
        elif self._pauses:
            multi_step = not (arm is Arm.SETTLING or self._shadowing or self._pairing)
            return DraftPlan(nothing, arm, self._odds, drafting_sec, replanning_sec, multi_step)
        drafts, took = self._drafted(deciding, room)
        return DraftPlan(drafts, arm, self._odds, drafting_sec + took, replanning_sec)

    def _drafted(
        self, deciding: Seq[Sequence], room: Callable[[Sequence, int], int]
    ) -> tuple[list[Draft], float]:
        """Every sequence's draft by its choice, and the seconds in models of proposers."""
        asked: dict[str, list[tuple[int, int]]] = {}
        left = tuning.MAX_DRAFT_TOKENS
        for i, sequence in enumerate(deciding):
            choice = self._choice(sequence)
            if choice is None:
                continue
            proposer, depth = choice
            depth = min(depth, sequence.remaining - 1, left, self._pairs.room(sequence))
            if depth > 0 and (granted := room(sequence, depth)):
                asked.setdefault(proposer.name, []).append((i, granted))
                left -= granted
        drafts, took = [NO_DRAFT] * len(deciding), 0.0
        chosen = [proposer for proposer in self.proposers if proposer.name in asked]
        sharing = sum(len(asked[p.name]) for p in chosen if p.pass_time is not None)
        for proposer in chosen:
            took += self._ask(proposer, asked[proposer.name], deciding, drafts, sharing)
        return drafts, took

    def on_passes(self, arm: Arm, passes: int) -> None:
        """The last step made so many passes in one call: each counts as the step does."""
        if self._counts:
            self.steps += passes - 1
        if arm is Arm.CONTROL:
            self._control_passes = passes

    def on_verified(self, sequence: Sequence, draft: Draft, accepted: int) -> None:
        """The verdict on a draft: estimates learn, proposers drop what was rejected."""
        if not draft.proposer:
            return
        own = self._own.setdefault(sequence, {})
        track = self._tracks.get(sequence)
        if track is not None:
            mine = own.setdefault(draft.proposer, Own())
            if mine.observe(len(draft), accepted):
                mine.close(track.rate, self.knowledge.spread_of(draft.proposer))
            track.observe(len(draft), accepted)
        self._by_name[draft.proposer].on_verified(sequence)

    def abandon(self, sequence: Sequence, draft: Draft) -> None:
        """The step continues without the sequence, so there will be no verdict on its draft."""
        if draft.proposer:
            self._by_name[draft.proposer].forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        self._shadow.forget(sequence)
        self._pairs.forget(sequence)
        self._at_rest.forget(sequence)
        self._own.pop(sequence, None)
        self._tracks.pop(sequence, None)
        selection = self._selection
        selection.opening.pop(sequence, None)
        if (choice := selection.choices.pop(sequence, None)) and sequence not in selection.tried:
            selection.left.setdefault(sequence.request.route, []).append(choice)
        selection.tried.discard(sequence)
        self._router.forget(sequence)
        for proposer in self.proposers:
            proposer.forget(sequence)

    # --- what an operator has switched off -----------------------------------------------------
    def switch(self, switches: DraftSwitches) -> None:
        """From the next step on, these count. All choices are made anew."""
        if switches is self._switches:
            return
        self._switches = switches
        self._off.clear()
        self._selection = _Selection(0, 0)
        self.decision_log.record_switched_on(switches.all)

    def is_off(self, proposer: str, sequence: Sequence) -> bool:
        return proposer in self._switched_off(sequence)

    def _switched_off(self, sequence: Sequence) -> Collection[str]:
        """Names of the proposers that are switched off for it."""
        if not self._switches.all:
            return ()
        job, scope = sequence.request.route.job, sequence.request.scope
        off = self._off.get((job, scope))
        if off is None:
            names = [proposer.name for proposer in self.proposers]
            is_coupled = sequence.verification is Verification.COUPLED
            # Outputs of ratio tests depend on drafts, so only an operator may take them away.
            which = self._switches.of if is_coupled else self._switches.by_operator
            by = {name: found for name in names if (found := which(scope, name))}
            self.decision_log.record_switched_off(job, by, everything=len(by) == len(names))
            if len(self._off) >= MOST_SCOPES:
                self._off.clear()
            off = self._off[job, scope] = frozenset(by)
        return off

    # --- one step ------------------------------------------------------------------------------
    def _drawn(self, count: int, may_be_control: bool) -> Arm:
        """Whether this step drafts, or measures depth 0 instead: that is chance, see `controls.py`.

        A step that replans is no control, as depth 0 alone would not replan.
        """
        if self._settling:
            self._settling -= 1
            if self._settling:
                return Arm.SETTLING
            self._control_passes = 1  # unless `on_passes` says more
            return Arm.CONTROL
        if self._selection.at_depth_0 and not self._opens:
            return Arm.PLAIN
        self._odds = self._control_every - 1.0
        if may_be_control and self._coin() * self._control_every < 1.0:
            self._settling = self._controller.settling_steps(count)
            self._selection.until = max(self._selection.until, self.steps + self._settling + 1)
            return Arm.SETTLING
        return Arm.DRAFTS

    def _choice(self, sequence: Sequence) -> Choice | None:
        """Who drafts for it now, and how many tokens of what there is."""
        request = sequence.request
        if request.pass_depths is not None:
            return self._fixed(sequence, request.pass_depths.get(sequence.num_output, 0))
        if request.depth is not None:
            return self._fixed(sequence, request.depth)
        if self._pauses:
            return None
        selection = self._selection
        chosen = selection.opening if self._opens else selection.choices
        choice = chosen.get(sequence) or self._of_newcomer(sequence)
        if choice is None:
            return None
        for proposer in selection.watched:
            if proposer is choice[0]:
                break
            if better := self._better(proposer, sequence):
                return better
        proposer, depth = choice
        if depth <= 0:
            return None
        there = proposer.available(sequence)
        if there > 0:
            return proposer, min(depth, there)
        for other in self.proposers:
            if other is proposer or not self._router.suits(other, sequence):
                continue
            if self._may(other, sequence):
                there = other.available(sequence)
                if there > 0:
                    return other, min(depth, there)
        return None

    def _fixed(self, sequence: Sequence, depth: int) -> Choice | None:
        option = self._best_option(sequence, self._capped(depth, sequence))
        return None if option is None else (option.proposer, option.limit)

    def _of_newcomer(self, sequence: Sequence) -> Choice | None:
        """What one of its route had that has ended, or as they have it on average, rounded."""
        selection, route = self._selection, sequence.request.route
        left = selection.left.get(route)
        found = left.pop() if left else selection.newcomers.get(route, selection.newcomer)
        if found is None:
            return None
        proposer, depth = self._router.instead(found[0], sequence), found[1]
        if not self._may(proposer, sequence):
            return None
        selection.choices[sequence] = choice = (proposer, min(depth, self._cap(sequence)))
        return choice

    def _better(self, proposer: Proposer, sequence: Sequence) -> Choice | None:
        """A free draft that turned up since the last replan, as long as it is worth verifying."""
        if not self._may(proposer, sequence):
            return None
        there = min(proposer.available(sequence), self._cap(sequence))
        if there <= 0:
            return None
        rate = self._rate(proposer, sequence)
        if rate <= self._selection.beats:
            return None
        return proposer, min(
            there, depth_worth(rate, self._selection.least_worth, tuning.MAX_DEPTH)
        )

    def _ask(
        self,
        proposer: Proposer,
        asked: list[tuple[int, int]],
        deciding: Seq[Sequence],
        drafts: list[Draft],
        sharing: int,
    ) -> float:
        """Puts a proposer's drafts into `drafts`; the seconds in its model.

        `sharing`: sequences that any draft model drafts for in this step.
        """
        begun = time.perf_counter()
        sequences = [deciding[i] for i, _ in asked]
        for sequence in sequences:
            self._tracks[sequence] = self._track(proposer, sequence)
            if self._router.several:
                self._router.asked(proposer, sequence, sequence in self._selection.tried)
        made = proposer.propose(sequences, [depth for _, depth in asked])
        took, token_ns = 0.0, 0
        if proposer.pass_time is not None:
            took = time.perf_counter() - begun
            passes = max(depth for _, depth in asked)
            token_sec = self._controller.token_sec(proposer.name, sharing, passes)
            token_ns = max(1, round(token_sec * 1e9))
        for (i, _), token_ids in zip(asked, made, strict=True):
            if token_ids:
                draft_probs = partial(proposer.draft_probs, deciding[i])
                probs = draft_probs if proposer.has_draft_probs else None
                drafts[i] = Draft(token_ids, proposer.name, token_ns, probs)
        return took

    def _draft_in_shadow(self, deciding: Seq[Sequence]) -> float:
        """The seconds that it took."""
        self._shadow.compare()
        took = 0.0
        picked: dict[str, list[Option]] = {}
        for sequence in deciding:
            most = min(SHADOW_DEPTH, self._cap(sequence), sequence.remaining - 1)
            if self._shadow.is_due(sequence) and (option := self._best_option(sequence, most)):
                picked.setdefault(option.proposer.name, []).append(option)
        for proposer in self.proposers:
            of = picked.get(proposer.name)
            if not of:
                continue
            begun = time.perf_counter()
            tracks = [self._track(proposer, option.sequence) for option in of]
            made = proposer.propose([w.sequence for w in of], [w.limit for w in of])
            took += time.perf_counter() - begun
            for option, track, draft in zip(of, tracks, made, strict=True):
                self._shadow.keep(option.sequence, proposer, draft, track)
        return took

    def _draft_in_pairs(self, deciding: Seq[Sequence], busy_sec: float) -> float:
        """Candidates and serving models draft for the same places; the seconds that it took."""
        self._pairs.compare()
        due = [sequence for sequence in deciding if self._pairs.is_due(sequence)]
        if not (due and self._pairs.may_draft(busy_sec)):
            return 0.0
        pairs = list(islice((pair for s in due if (pair := self._pair_of(s))), AT_ONCE))
        if not pairs:
            return 0.0
        begun = time.perf_counter()
        for proposer in self.proposers:
            of = [pair for pair in pairs if proposer in (pair.candidate, pair.serving)]
            if of:
                made = proposer.propose([p.sequence for p in of], [p.depth for p in of])
                for pair, draft in zip(of, made, strict=True):
                    pair.drafts[proposer.name] = draft
                    proposer.on_verified(pair.sequence)
        took = time.perf_counter() - begun
        for pair in pairs:
            self._pairs.keep(pair, self._track(pair.candidate, pair.sequence))
        self._pairs.spend(took)
        return took

    def _pair_of(self, sequence: Sequence) -> Pair | None:
        """Who is compared on it, and how far both can draft; None: nobody, or not now."""
        candidate = self._by_name.get(sequence.request.candidate or "")
        if candidate is None or not (_is_model(candidate) and self._is_open(candidate, sequence)):
            return None
        serving = self._serving(sequence)
        if serving is None:
            return None
        depth = min(
            SHADOW_DEPTH,
            self._cap(sequence),
            sequence.remaining - 1,
            candidate.available(sequence),
            serving.available(sequence),
        )
        return Pair(sequence, candidate, serving, depth) if depth > 0 else None

    def _serving(self, sequence: Sequence) -> Proposer | None:
        """The draft model that serves it, also while drafts do not pay."""
        return max(
            (p for p in self.proposers if _is_model(p) and self._is_source(p, sequence)),
            key=lambda p: (self._router.suits(p, sequence), self._rate(p, sequence)),
            default=None,
        )

    def _sample_at_rest(self, deciding: Seq[Sequence]) -> float:
        """Now and then a draft in shadow by a proposer that is disabled, for one sequence: else
        nothing would tell that it recovered. The seconds that it took; the next one waits until
        they are a small share of the time."""
        self._at_rest.compare()
        begun = time.perf_counter()
        if not self._at_rest.is_empty or begun < self._sample_at:
            return 0.0
        self._samples += 1
        sequence = deciding[self._samples % len(deciding)]
        resting = [p for p in self.proposers if self._rests(p, sequence)]
        if not resting:
            return 0.0
        proposer = resting[self._samples // len(deciding) % len(resting)]
        most = min(DEPTH_AT_REST, self._cap(sequence), sequence.remaining - 1)
        depth = min(most, proposer.available(sequence))
        if depth <= 0:
            return 0.0
        track = self._track(proposer, sequence)
        (draft,) = proposer.propose([sequence], [depth])
        self._at_rest.keep(sequence, proposer, draft, track)
        took = time.perf_counter() - begun
        self._sample_at = begun + took / tuning.REST_SHARE
        return took

    def _rests(self, proposer: Proposer, sequence: Sequence) -> bool:
        """Whether it would be asked, if its drafts had paid. A draft is what depth 0 decides only
        where both share their noise."""
        request = sequence.request
        return (
            request.depth is None
            and sequence.verification is Verification.COUPLED
            and self._is_source(proposer, sequence)
            and self.decision_log.rests(request.route.job, proposer.name)
        )

    # --- replanning ----------------------------------------------------------------------------
    def _must_replan(self, count: int) -> bool:
        """Whether the choice has stood long enough, was made for another number of sequences, or
        rests on an acceptance that drafts do not reach any more."""
        selection = self._selection
        if (
            self.steps >= selection.until
            or 4 * abs(count - selection.sequences) > selection.sequences
        ):
            return True
        return not selection.at_depth_0 and self.decision_log.tracks.surprised()

    def _replan(self, deciding: Seq[Sequence]) -> None:
        self._replans += 1
        self._shadowing = any(s.request.shadow for s in deciding)
        self._pairing = any(s.request.candidate in self._by_name for s in deciding)
        known = self.knowledge.step_time.plain(len(deciding)) is not None
        self.decision_log.tracks.fold()
        self.decision_log.review(self.steps)
        view = self._sample(deciding)
        options, picked = self._options_of_all(view, len(deciding))
        is_full = len(view) == len(deciding)
        chosen = self._controller.replan(candidates(picked), len(deciding) - len(picked), is_full)
        if not (is_full or chosen.at_depth_0):
            is_full = True  # a sample found that it may pay
            options, picked = self._options_of_all(deciding, len(deciding))
            chosen = self._controller.replan(candidates(picked), len(deciding) - len(picked))
        self._take(chosen, picked, len(deciding))
        settling = self._controller.settling_steps(len(deciding))
        self._control_every = (
            chosen.control_every(settling + self._control_passes)
            if known
            else tuning.FIRST_CONTROL_EVERY
        )
        if chosen.weighed and picked:
            if is_full:  # a few cannot pay for a draft model's call
                record_decisions(
                    self.decision_log, self._controller, chosen, picked, self.steps, len(deciding)
                )
            if not chosen.at_depth_0:
                self._router.record_routes(self.decision_log, options)
            self._try(self._router.trial(options, picked, chosen.at_depth_0, self.steps))

    def _sample(self, deciding: Seq[Sequence]) -> Seq[Sequence]:
        """Whom a replan looks at: at depth 0 mostly a few."""
        few = self._selection.at_depth_0 and len(deciding) > tuning.SAMPLE_SHARE
        if not (few and self._replans % tuning.FULL_EVERY_REPLANS and self.steps > 1):
            return deciding
        return deciding[self._replans % tuning.SAMPLE_SHARE :: tuning.SAMPLE_SHARE]

    def _options_of_all(
        self, view: Seq[Sequence], count: int
    ) -> tuple[list[list[Option]], list[Option]]:
        """All sources of each sequence that has any, and the one chosen for it."""
        self._router.begin(count)
        free = (s for s in view if s.request.depth is None)
        options = [found for s in free if (found := self._options(s, self._cap(s)))]
        return options, self._router.pick(options, self.steps)

    def _take(self, chosen: DepthSchedule, picked: Seq[Option], count: int) -> None:
        self._selection = selection = _Selection(
            self.steps + chosen.steps, count, chosen.at_depth_0
        )
        if chosen.opening is not None:
            selection.opening_until = self.steps + chosen.opening_steps
            selection.opening = choices(picked, chosen.opening)
        if chosen.at_depth_0:
            return
        selection.least_worth = chosen.least_worth
        selection.choices = choices(picked, chosen.depths)
        by_route: dict[Cohort, list[tuple[Option, int]]] = {}
        for option, depth in zip(picked, chosen.depths, strict=True):
            by_route.setdefault(option.sequence.request.route, []).append((option, depth))
        selection.newcomers = {route: usual(of) for route, of in by_route.items()}
        selection.newcomer = usual(list(zip(picked, chosen.depths, strict=True)))
        selection.beats = sum(w.rate for w in picked) / len(picked) + tuning.CLEARLY_BETTER
        free = [p for p in self.proposers if p.pass_time is None]
        selection.watched = tuple(p for p in free if self._is_worth_watching(p, selection.beats))

    def _try(self, tried: Seq[Option]) -> None:
        """Let a model that is not theirs draft for a few sequences, for a few steps."""
        if not tried:
            return
        selection = self._selection
        selection.at_depth_0 = False
        selection.until = min(selection.until, self.steps + tuning.MODEL_TRIAL_STEPS)
        selection.opening_until = 0
        selection.tried = {option.sequence for option in tried}
        for option in tried:
            selection.choices[option.sequence] = (
                option.proposer,
                min(option.limit, tuning.MODEL_TRIAL_DEPTH),
            )

    def _is_worth_watching(self, proposer: Proposer, beats: float) -> bool:
        """Whether its best drafts were better than what is chosen on average."""
        return any(
            track.judged >= tuning.BREAKER_TESTS and track.rate > beats
            for track in self.decision_log.tracks.of_proposer(proposer.name)
        )

    # --- one sequence and one proposer ---------------------------------------------------------
    def _best_option(self, sequence: Sequence, most: int) -> Option | None:
        """The most promising source: by its acceptance, less what its drafts cost."""
        options = self._options(sequence, most)
        return self._router.best(options) if options else None

    def _options(self, sequence: Sequence, most: int) -> list[Option]:
        """All sources of a sequence. Its end is no limit: a choice is for those that follow too."""
        found: list[Option] = []
        for proposer in self.proposers if most > 0 else ():
            if not self._may(proposer, sequence):
                continue
            there = proposer.available(sequence)
            if there <= 0:
                continue
            limit = most if there >= sequence.remaining - 1 else min(most, there)
            rate = self._rate(proposer, sequence)
            score = rate - self._router.burden(proposer)
            found.append(Option(sequence, proposer, limit, rate, score))
        for option in found if len(found) > 1 else ():
            option.score += self._track(option.proposer, sequence).doubt
        return found

    def _may(self, proposer: Proposer, sequence: Sequence) -> bool:
        """Whether its drafts may be verified now."""
        request = sequence.request
        if not self._is_source(proposer, sequence):
            return False
        if request.depth is not None and not request.shadow:
            return True  # a fixed depth is what was asked for, whether it pays or not
        return self.decision_log.allows(request.route.job, proposer.name, self.steps)

    def _is_source(self, proposer: Proposer, sequence: Sequence) -> bool:
        """Whether its drafts may be verified, if they pay. Ratio tests need to know what a draft
        was sampled from; a row may name its draft model, and its candidate drafts in shadow only.
        """
        if not self._is_open(proposer, sequence):
            return False
        request = sequence.request
        if _is_model(proposer):
            if request.draft_model not in (None, proposer.name):
                return False
            if request.draft_model is None and request.candidate == proposer.name:
                return False
        return sequence.verification is Verification.COUPLED or proposer.has_draft_probs

    def _is_open(self, proposer: Proposer, sequence: Sequence) -> bool:
        """Jobs may name their sources, and operators switch them off."""
        if self.is_off(proposer.name, sequence):
            return False
        sources = sequence.request.sources
        return sources is None or kind_of(proposer.name) in sources

    def _cap(self, sequence: Sequence) -> int:
        cap = sequence.request.max_depth
        most = tuning.MAX_DEPTH if cap is None else min(tuning.MAX_DEPTH, cap)
        return self._capped(most, sequence)

    @staticmethod
    def _capped(depth: int, sequence: Sequence) -> int:
        """The depth as its prompt and output are long by now: their KV is read for every block."""
        context = len(sequence.tokens)
        for least, most in sequence.request.context_depths:
            if context >= least:
                depth = min(depth, most)
        return depth

    def _track(self, proposer: Proposer, sequence: Sequence) -> Track:
        route = sequence.request.route
        return self.decision_log.track(
            proposer.name, proposer.confidence_bucket(sequence), route.job, route.tag
        )

    def _rate(self, proposer: Proposer, sequence: Sequence) -> float:
        overall = self._track(proposer, sequence).rate
        own = self._own.get(sequence)
        if own is None or proposer.name not in own:
            return overall
        return own[proposer.name].rate(overall, self.knowledge.spread_of(proposer.name))


def _is_model(proposer: Proposer) -> bool:
    return kind_of(proposer.name) == DRAFT_MODEL
