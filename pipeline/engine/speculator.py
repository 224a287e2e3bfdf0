"""Chooses who drafts for each sequence, and how far.

Looking at all sequences and prices takes longer than a small model's step, so a choice stands for
some steps. In between, sequences that arrive are drafted for like the others on average.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from specbatch.pipeline.engine.proposer import Proposer, has_laws
from specbatch.pipeline.engine.sequence import Sequence
from specbatch.pipeline.policy.acceptance import Acceptance
from specbatch.pipeline.policy.controller import Controller
from specbatch.pipeline.policy.depth import Candidate
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.schemas.records import Verification

CONTROL_EVERY_STEPS = 96  # one step in so many goes at depth 0, to know what that really costs
MAX_DEPTH = 16
_POOR_ACCEPTANCE = 0.3  # below it the next proposer in line is asked instead

Choice = tuple[Proposer, int]


@dataclass(slots=True)
class _Course:
    """What a look decided, until the next one."""

    until: int  # step
    sequences: int
    choices: dict[Sequence, Choice] = field(default_factory=dict)
    newcomers: Choice | None = None  # for those who were not there

    @property
    def rests(self) -> bool:
        return not self.choices and self.newcomers is None


@dataclass(slots=True)
class Speculator:
    """Owns the proposers and what is known of them. Without proposers every depth is 0."""

    proposers: Seq[Proposer]
    knowledge: Knowledge = field(default_factory=Knowledge)
    max_draft_tokens: int = 1024  # per step
    steps: int = 0
    drafting_sec: float = 0.0  # of the last step, in models of proposers
    _course: _Course = field(default_factory=lambda: _Course(0, 0))
    _controller: Controller = field(init=False)
    _own: dict[Sequence, dict[str, Acceptance]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for proposer in self.proposers:
            if proposer.pass_time is not None:
                self.knowledge.draft_time = proposer.pass_time
        self._controller = Controller(self.knowledge, self.max_draft_tokens)

    def propose(
        self, deciding: Seq[Sequence], room: Callable[[Sequence, int], int]
    ) -> tuple[list[list[int]], list[Proposer | None]]:
        """Draft tokens for every deciding sequence (empty: depth 0), and who made them.

        `room(sequence, wanted)` says how many draft tokens there are KV blocks for.
        """
        drafts: list[list[int]] = [[] for _ in deciding]
        makers: list[Proposer | None] = [None] * len(deciding)
        self.drafting_sec = 0.0
        if not (self.proposers and deciding):
            return drafts, makers
        self.steps += 1
        if self._is_over(len(deciding)):
            self._look(deciding)
        asked: dict[str, list[tuple[int, int]]] = {}
        for i, sequence in enumerate(deciding):
            choice = self._choice(sequence)
            if choice is None:
                continue
            proposer, depth = choice
            depth = min(depth, sequence.remaining - 1)
            if depth > 0:
                depth = min(depth, proposer.available(sequence))
            if depth > 0 and (granted := room(sequence, depth)):
                asked.setdefault(proposer.name, []).append((i, granted))
        for proposer in self.proposers:
            if proposer.name in asked:
                self._ask(proposer, asked[proposer.name], deciding, drafts, makers)
        return drafts, makers

    def observe(
        self, sequence: Sequence, maker: Proposer | None, draft: list[int], accepted: int
    ) -> None:
        """The verdict on a draft: estimates learn, proposers drop what was rejected."""
        if maker is None:
            return
        own = self._own.setdefault(sequence, {})
        if maker.name not in own:
            own[maker.name] = Acceptance()
        own[maker.name].observe(len(draft), accepted)
        self.knowledge.acceptance_of(maker.name).observe(len(draft), accepted)
        maker.settle(sequence)

    def forget(self, sequence: Sequence) -> None:
        self._own.pop(sequence, None)
        self._course.choices.pop(sequence, None)
        for proposer in self.proposers:
            proposer.forget(sequence)

    @property
    def in_control_step(self) -> bool:
        return self.steps % CONTROL_EVERY_STEPS == 0

    # --- one step ------------------------------------------------------------------------------
    def _choice(self, sequence: Sequence) -> Choice | None:
        fixed = sequence.request.depth
        if fixed is not None:
            want = self._most_promising(sequence, fixed) if fixed else None
            return None if want is None else (want[0], fixed)
        if self._course.rests or self.in_control_step:
            return None
        choice = self._course.choices.get(sequence)
        if choice is not None or self._course.newcomers is None:
            return choice
        return self._course.newcomers if _may_draft(self._course.newcomers[0], sequence) else None

    def _ask(
        self,
        proposer: Proposer,
        asked: list[tuple[int, int]],
        deciding: Seq[Sequence],
        drafts: list[list[int]],
        makers: list[Proposer | None],
    ) -> None:
        begun = time.perf_counter()
        made = proposer.propose([deciding[i] for i, _ in asked], [depth for _, depth in asked])
        if proposer.pass_time is not None:
            self.drafting_sec += time.perf_counter() - begun
        for (i, _), draft in zip(asked, made, strict=True):
            drafts[i] = draft
            makers[i] = proposer if draft else None

    # --- a look at all of it -------------------------------------------------------------------
    def _is_over(self, count: int) -> bool:
        """Whether the choice has stood long enough, or was made for another number of sequences."""
        course = self._course
        return self.steps >= course.until or 4 * abs(count - course.sequences) > course.sequences

    def _look(self, deciding: Seq[Sequence]) -> None:
        wants = [
            (sequence, *want)
            for sequence in deciding
            if sequence.request.depth is None
            and (want := self._most_promising(sequence, MAX_DEPTH)) is not None
        ]
        candidates = [
            Candidate(limit, self._rate(proposer, sequence), proposer.pass_time is not None)
            for sequence, proposer, limit in wants
        ]
        chosen = self._controller.look(candidates, len(deciding) - len(wants))
        self._course = course = _Course(self.steps + chosen.steps, len(deciding))
        if chosen.rests:
            return
        course.choices = {
            sequence: (proposer, depth)
            for (sequence, proposer, _), depth in zip(wants, chosen.depths, strict=True)
        }
        if not chosen.trial:
            course.newcomers = (wants[0][1], round(sum(chosen.depths) / len(wants)))

    def _most_promising(self, sequence: Sequence, most: int) -> Choice | None:
        """(proposer, draft tokens it can offer), in the order they are given unless one is poor."""
        cap = min(most, sequence.remaining - 1)
        best: Choice | None = None
        for proposer in self.proposers:
            if not _may_draft(proposer, sequence):
                continue
            limit = min(cap, proposer.available(sequence)) if cap > 0 else 0
            if limit <= 0:
                continue
            if self._rate(proposer, sequence) >= _POOR_ACCEPTANCE:
                return proposer, limit
            best = best or (proposer, limit)
        return best

    def _rate(self, proposer: Proposer, sequence: Sequence) -> float:
        overall = self.knowledge.acceptance_of(proposer.name).rate
        own = self._own.get(sequence, {}).get(proposer.name)
        return overall if own is None else own.rate_given(overall)


def _may_draft(proposer: Proposer, sequence: Sequence) -> bool:
    """Ratio tests need to know what a draft was sampled from."""
    return sequence.verification is Verification.COUPLED or has_laws(proposer)
