"""Looks at all sequences now and then, and says how far each is drafted for until the next look.

Most looks take what is known to be best. Some try a size that nobody has seen and that could be
better, for a few steps only, and never more than a small share of the time: a machine's steps are
not found by standing still. While drafting does
not pay, a few sequences are drafted for by one token now and then, to notice when it would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specbatch.pipeline.policy.depth import Candidate, DepthDecision, StepCost, choose_depths
from specbatch.pipeline.policy.knowledge import Knowledge

STAND_STEPS = 16  # how long a choice stands
EXPLORE_EVERY_LOOKS = 3
EXPLORE_STEPS = 3
ALLOWANCE = 0.015  # of all time may be lost in trials
TRY_EVERY_LOOKS = 4  # while nothing is drafted
TRIED_SHARE = 8  # … one token each, for one sequence in so many
HYSTERESIS = 1.02  # drafting must promise so much more before it is taken up
JUDGED = 40  # draft tokens, before a choice stands for long
_UNJUDGED_STEPS = 2
_FIRST_DEPTHS = (0, 0, 3, 1, 3)  # steps of a new engine: they tell what a token costs


@dataclass(frozen=True, slots=True)
class Course:
    """Draft tokens per candidate, for so many steps."""

    depths: tuple[int, ...]
    steps: int
    trial: bool = False  # of a few sequences only: it says nothing about the others

    @property
    def rests(self) -> bool:
        return not any(self.depths)


@dataclass(slots=True)
class Controller:
    """Depths by marginal gain, from what is known of the machine and the drafts."""

    knowledge: Knowledge = field(default_factory=Knowledge)
    max_draft_tokens: int = 1024  # per step
    looks: int = 0
    _drafting: bool = False
    _put_aside: float = 0.0  # seconds that trials may lose

    def look(self, candidates: Sequence[Candidate], others: int = 0) -> Course:
        """A course for the candidates; `others` take part in every step whatever is chosen."""
        self.looks += 1
        if not candidates:
            return Course((), STAND_STEPS)
        if not self.knowledge.step_time.has_slope:
            depth = _FIRST_DEPTHS[self.looks % len(_FIRST_DEPTHS)]
            return Course(tuple(min(c.limit, depth) for c in candidates), 1)
        decision, off = self._decide(candidates, others, optimism=0.0)
        self._put_aside += ALLOWANCE * STAND_STEPS * decision.expected_sec
        if self.looks % EXPLORE_EVERY_LOOKS == 0:
            hopeful, _ = self._decide(candidates, others, optimism=1.0)
            best = max(decision.tokens_per_sec, off)
            if self._may_be_tried(hopeful, best, len(candidates) + others):
                return Course(hopeful.depths, EXPLORE_STEPS)
        self._drafting = decision.tokens_per_sec > off * (1.0 if self._drafting else HYSTERESIS)
        if self._drafting:
            tested = sum(a.tested for a in self.knowledge.acceptance.values())
            return Course(decision.depths, STAND_STEPS if tested >= JUDGED else _UNJUDGED_STEPS)
        if self.looks % TRY_EVERY_LOOKS:
            return Course((0,) * len(candidates), STAND_STEPS)
        turn = self.looks // TRY_EVERY_LOOKS % TRIED_SHARE
        tried = tuple(int(i % TRIED_SHARE == turn) for i in range(len(candidates)))
        return Course(tried, 1, trial=True)

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
        self, candidates: Sequence[Candidate], others: int, optimism: float
    ) -> tuple[DepthDecision, float]:
        """The best depths, and the tokens per second of depth 0."""
        count = len(candidates) + others
        most = min(self.max_draft_tokens, sum(c.limit for c in candidates))
        known = self.knowledge
        verify_sec = known.step_time.curve(count, count, count + most, optimism)
        known.draft_time.solve()
        cost = StepCost(verify_sec, *known.draft_time.weights)
        return choose_depths(candidates, cost, others), count / float(verify_sec[0])
