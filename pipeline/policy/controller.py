"""Looks at all sequences now and then, and says how far each is drafted for until the next look.

Most looks take what is known to be best. Some try a size that nobody has seen and that could be
better, for a few steps only, and never more than a small share of the time: a machine's steps are
not found by standing still. While drafting does not pay, a few sequences are drafted for by one
token now and then, to notice when it would. A choice stands the longer, the more a look costs
beside a step, so that looking never takes more than a small share of the time either.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from specbatch.pipeline.policy.depth import (
    Candidate,
    DepthDecision,
    StepCost,
    break_even,
    choose_depths,
)
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.pipeline.policy.routing import Price

STAND_STEPS = 16  # how long a choice stands at least, once drafts have been judged
LONGEST_STAND_STEPS = 384
LOOK_SHARE = 0.002  # of the time may go into looks
EXPLORE_EVERY_LOOKS = 3
EXPLORE_STEPS = 3
ALLOWANCE = 0.008  # of all time may be lost in trials …
FIRST_ALLOWANCE_SEC = 0.05  # … and so much at the beginning, when everything is unknown
WELL_KNOWN = 1000  # passes, after which it is not
TRY_EVERY_STEPS = 64  # those who are not drafted for are tried …
TRIED_SHARE = 8  # … one token each, for one sequence in so many
CONTROL_SHARE = 0.005  # of the time may be lost by going at depth 0 while drafting pays …
CONTROL_EVERY_STEPS = (16, 192)  # … which is done to know its price, and what drafting saves
SETTLING_SEC = 0.002  # at depth 0 before a control: by then what drafts left in caches has gone
MOST_SETTLING_STEPS = 6
HYSTERESIS = 1.015  # drafting must promise so much more before it is taken up
JUDGED = 40  # draft tokens, before a choice stands for long
_UNJUDGED_STEPS = 2
_FIRST_DEPTHS = (0, 0, 3, 1, 3)  # steps of a new engine: they tell what a token costs


@dataclass(frozen=True, slots=True)
class Course:
    """Draft tokens per candidate, for so many steps; the first few of them may try other depths."""

    depths: tuple[int, ...]
    steps: int
    least_worth: float = 1.0  # what a draft token must be worth to be verified, in tokens
    weighed: bool = False  # all that is known was weighed: it tells whether drafts pay
    gain: float = 1.0  # tokens per second expected, over depth 0's
    opening: tuple[int, ...] | None = None  # depths of the first steps, where some are tried
    opening_steps: int = 0

    @property
    def rests(self) -> bool:
        """Whether nothing is drafted, but for what is tried."""
        return not any(self.depths)

    def control_every(self, settling: int) -> int:
        """One step in so many begins to go at depth 0, by chance: the more, the less is lost by it.
        `settling`: steps before the one that is measured."""
        least, most = CONTROL_EVERY_STEPS
        if not self.weighed:
            return most
        return int(min(max((self.gain - 1.0) * (1 + settling) / CONTROL_SHARE, least), most))

    def opened(self, depths: tuple[int, ...], steps: int) -> Course:
        """The same course behind so many steps of other depths."""
        steps_in_all = max(self.steps, steps)
        return replace(self, steps=steps_in_all, opening=depths, opening_steps=steps)

    def at(self, step: int) -> tuple[int, ...]:
        """The depths of a step of it, which count from 0."""
        if self.opening is not None and step < self.opening_steps:
            return self.opening
        return self.depths


@dataclass(slots=True)
class Controller:
    """Depths by marginal gain, from what is known of the machine and the drafts."""

    knowledge: Knowledge = field(default_factory=Knowledge)
    max_draft_tokens: int = 1024  # per step
    looks: int = 0
    look_sec: float = 0.0  # what a look takes, on average; told by whoever measures it
    _drafting: bool = False
    _put_aside: float = 0.0  # seconds that trials may lose
    _untried: int = 0  # steps since those who are not drafted for were tried
    _turn: int = 0

    def __post_init__(self) -> None:
        if self.knowledge.step_time.observations < WELL_KNOWN:
            self._put_aside = FIRST_ALLOWANCE_SEC

    def look(
        self, candidates: Sequence[Candidate], others: int = 0, explores: bool = True
    ) -> Course:
        """A course for the candidates; `others` take part in every step whatever is chosen.

        Without `explores` no size is tried that nobody has seen, and nothing is spent on it.
        """
        self.looks += 1
        if not candidates:
            return Course((), STAND_STEPS)
        if not self.knowledge.step_time.has_slope:
            depth = _FIRST_DEPTHS[self.looks % len(_FIRST_DEPTHS)]
            return Course(tuple(min(c.limit, depth) for c in candidates), 1)
        decision, off = self._decide(candidates, others, optimism=0.0)
        stand = self._stand(decision.expected_sec)
        self._put_aside += ALLOWANCE * stand * decision.expected_sec
        course = self._settled(decision, off, stand)
        if explores and self.looks % EXPLORE_EVERY_LOOKS == 0:
            hopeful = self._hopeful(candidates, others, sum(decision.depths))
            best = max(decision.tokens_per_sec, off)
            if self._may_be_tried(hopeful, best, len(candidates) + others):
                return course.opened(hopeful.depths, EXPLORE_STEPS)
        return course

    def looked(self, seconds: float) -> None:
        """What the last look took, with all that was asked for it."""
        share = 0.2 if self.look_sec else 1.0
        self.look_sec += share * (min(seconds, 4.0 * (self.look_sec or seconds)) - self.look_sec)

    def break_even(self, sequences: int, model: str | None) -> float:
        """The acceptance from which on drafts of a kind would pay in steps of so many sequences."""
        most = min(self.max_draft_tokens, 8 * sequences)
        curve = self.knowledge.step_time.curve(sequences, sequences, sequences + most)
        return break_even(self._cost(curve, model), sequences, model is not None, HYSTERESIS)

    def burden(self, sequences: int, model: str) -> float:
        """Price of one drafted token of a model, in tokens that depth 0 would decide meanwhile."""
        _, per_pass, row = self._draft_weights(model)
        plain = self.knowledge.step_time.curve(sequences, sequences, sequences)[0]
        return float((per_pass + sequences * row) / plain)

    def price(self, sequences: int, model: str | None) -> Price:
        """What drafts for all of so many sequences cost; of no model: verifying them alone."""
        curve = self.knowledge.step_time.curve(sequences, sequences, 2 * sequences)
        plain, verifying = float(curve[0]), float(curve[-1] - curve[0])
        if model is None:
            return Price(0.0, verifying / plain, 0.0)
        call, per_pass, row = self._draft_weights(model)
        token = per_pass + sequences * row + verifying
        return Price(call / plain, token / plain, row / plain)

    def plain_sec(self, sequences: int) -> float:
        """Seconds of a step of depth 0."""
        return float(self.knowledge.step_time.curve(sequences, sequences, sequences)[0])

    def settling_steps(self, sequences: int) -> int:
        """At depth 0, before a step of so many sequences is as if nothing had been drafted."""
        steps = math.ceil(SETTLING_SEC / self.plain_sec(sequences))
        return min(max(steps, 1), MOST_SETTLING_STEPS)

    def promise(self, candidates: Sequence[Candidate], others: int = 0) -> DepthDecision:
        """The best that is known to be had of candidates; nothing is decided by it."""
        return self._decide(candidates, others, optimism=0.0)[0]

    def _settled(self, decision: DepthDecision, off: float, stand: int) -> Course:
        """What is known to be best, and now and then a draft for those who are not drafted for."""
        gain = decision.tokens_per_sec / off
        self._drafting = gain > (1.0 if self._drafting else HYSTERESIS)
        if not self._drafting:
            rest = Course((0,) * len(decision.depths), stand, weighed=True)
            return self._tried_now_and_then(rest, TRY_EVERY_STEPS)
        steps = stand if self._judged() else _UNJUDGED_STEPS
        course = Course(decision.depths, steps, decision.least_worth, True, gain)
        return self._tried_now_and_then(course, max(TRY_EVERY_STEPS, 2 * steps))

    def _tried_now_and_then(self, course: Course, every: int) -> Course:
        """Of those at depth 0, one in so many is tried in a step in so many."""
        left_out = [i for i, depth in enumerate(course.depths) if not depth]
        if not left_out:
            return course
        if self._untried < every:
            self._untried += course.steps
            return course
        self._untried = course.steps
        self._turn += 1
        share = min(TRIED_SHARE, len(left_out))
        depths = list(course.depths)
        for i in left_out[-self._turn % share :: share]:
            depths[i] = 1
        return course.opened(tuple(depths), 1)

    def _stand(self, step_sec: float) -> int:
        wanted = self.look_sec / (LOOK_SHARE * step_sec)
        return int(min(max(wanted, STAND_STEPS), LONGEST_STAND_STEPS))

    def _judged(self) -> bool:
        return sum(a.tested for a in self.knowledge.acceptance.values()) >= JUDGED

    def _hopeful(self, candidates: Sequence[Candidate], others: int, chosen: int) -> DepthDecision:
        """What may be better than `chosen` draft tokens: halfway to the best that can be hoped for.

        Half of what is unknown is known after it, whatever it shows.
        """
        hopeful, _ = self._decide(candidates, others, optimism=1.0)
        far = sum(hopeful.depths)
        if far - chosen < 2:
            return hopeful
        nearer, _ = self._decide(candidates, others, 1.0, most=(chosen + far) // 2)
        count = len(candidates) + others
        known = self.knowledge.step_time.knows(count + sum(nearer.depths), count)
        return hopeful if known else nearer

    def _may_be_tried(self, hopeful: DepthDecision, best: float, count: int) -> bool:
        """Whether its size is unknown, and what the trial may lose has been put aside."""
        step_time, tokens = self.knowledge.step_time, count + sum(hopeful.depths)
        if step_time.knows(tokens, count):
            return False
        guessed, likely = (float(step_time.curve(tokens, count, tokens, o)[0]) for o in (1.0, 0.0))
        seconds = hopeful.expected_sec - guessed + likely
        loss = EXPLORE_STEPS * (seconds - hopeful.expected_tokens / best)
        if loss > self._put_aside:
            return False
        self._put_aside -= max(loss, 0.0)
        return True

    def _decide(
        self,
        candidates: Sequence[Candidate],
        others: int,
        optimism: float,
        most: int | None = None,
    ) -> tuple[DepthDecision, float]:
        """The best depths, and the tokens per second of depth 0."""
        count = len(candidates) + others
        if most is None:
            most = min(self.max_draft_tokens, sum(c.limit for c in candidates))
        curve = self.knowledge.step_time.curve(count, count, count + most, optimism)
        models = Counter(c.model for c in candidates if c.model is not None).most_common()
        main = models[0][0] if models else None
        if len(models) <= 1:
            cost = self._cost(curve, main)
            return choose_depths(candidates, cost, others), count / float(curve[0])
        # The most common model and the free drafts first; each further model with what is left.
        depths = [0] * len(candidates)
        tokens, seconds, worth, taken = float(count), float(curve[0]), 1.0, 0
        for model, _ in models:
            own = [
                i
                for i, c in enumerate(candidates)
                if c.model == model or (c.model is None and model == main)
            ]
            part = [candidates[i] for i in own]
            rest = curve[taken:] + (seconds - float(curve[taken]))
            found = choose_depths(part, self._cost(rest, model), tokens - len(part))
            for i, depth in zip(own, found.depths, strict=True):
                depths[i] = depth
            taken += sum(found.depths)
            tokens, seconds = found.expected_tokens, found.expected_sec
            worth = min(worth, found.least_worth)
        return DepthDecision(tuple(depths), tokens, seconds, worth), count / float(curve[0])

    def _cost(self, verify_sec: NDArray[np.float64], model: str | None) -> StepCost:
        if model is None:
            return StepCost(verify_sec)
        return StepCost(verify_sec, *self._draft_weights(model))

    def _draft_weights(self, model: str) -> tuple[float, float, float]:
        known = self.knowledge.draft_time_of(model)
        known.solve()
        call, per_pass, row = known.weights
        return call, per_pass, row
