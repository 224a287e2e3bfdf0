"""Chooses, for each sequence and step, who drafts for it and how far."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from specbatch.pipeline.engine.proposer import Proposer
from specbatch.pipeline.engine.sequence import Sequence
from specbatch.pipeline.policy.acceptance import Acceptance
from specbatch.pipeline.policy.depth import Candidate, StepCost, choose_depths
from specbatch.pipeline.policy.step_time import StepTime

CONTROL_EVERY_STEPS = 48  # one control window in so many steps …
CONTROL_STEPS = 3  # … of so many steps at depth 0, to know what it really costs
PROBE_EVERY_STEPS = 12  # while the price of a row is unknown
RESTING_STEPS = 8  # after a decision for depth 0 the question rests for so many steps
_POOR_ACCEPTANCE = 0.3  # below it the next proposer in line is asked instead


@dataclass(slots=True)
class _Want:
    """What one sequence could have drafted in this step."""

    index: int
    sequence: Sequence
    proposer: Proposer
    limit: int


@dataclass(slots=True)
class Speculator:
    """Owns the proposers and what is known of them. Without proposers every depth is 0."""

    proposers: Seq[Proposer]
    verify_time: StepTime = field(default_factory=StepTime)
    max_draft_tokens: int = 1024  # per step
    steps: int = 0
    _asked_at: int = -RESTING_STEPS  # step of the last decision for depth 0
    _asked_for: int = 0  # sequences it was taken for
    _overall: dict[str, Acceptance] = field(default_factory=dict)
    _own: dict[tuple[str, Sequence], Acceptance] = field(default_factory=dict)

    def propose(
        self, deciding: Seq[Sequence], room: Callable[[Sequence, int], int]
    ) -> tuple[list[list[int]], list[Proposer | None]]:
        """Draft tokens for every deciding sequence (empty: depth 0), and who made them.

        `room(sequence, wanted)` says how many draft tokens there are KV blocks for.
        """
        drafts: list[list[int]] = [[] for _ in deciding]
        makers: list[Proposer | None] = [None] * len(deciding)
        self.steps += 1
        if self._rests(deciding):
            return drafts, makers
        wants = [w for i, s in enumerate(deciding) if (w := self._want(i, s)) is not None]
        depths = self._depths(wants, len(deciding))
        for proposer in self.proposers:
            chosen = [
                (w, granted)
                for w, depth in zip(wants, depths, strict=True)
                if w.proposer is proposer and depth and (granted := room(w.sequence, depth))
            ]
            if not chosen:
                continue
            made = proposer.propose([w.sequence for w, _ in chosen], [d for _, d in chosen])
            for (want, _), draft in zip(chosen, made, strict=True):
                drafts[want.index] = draft
                makers[want.index] = proposer if draft else None
        return drafts, makers

    def observe(
        self, sequence: Sequence, maker: Proposer | None, draft: list[int], accepted: int
    ) -> None:
        """The verdict on a draft: estimates learn, proposers drop what was rejected.

        `draft` is empty where it was dropped before the pass.
        """
        if maker is None:
            return
        self._estimate(maker, sequence).observe(len(draft), accepted)
        self._overall.setdefault(maker.name, Acceptance()).observe(len(draft), accepted)
        maker.settle(sequence)

    def forget(self, sequence: Sequence) -> None:
        for proposer in self.proposers:
            proposer.forget(sequence)
            self._own.pop((proposer.name, sequence), None)

    @property
    def in_control_window(self) -> bool:
        return self.steps % CONTROL_EVERY_STEPS >= CONTROL_EVERY_STEPS - CONTROL_STEPS

    def _rests(self, deciding: Seq[Sequence]) -> bool:
        """Whether depth 0 was chosen lately for about as many sequences, none of fixed depth."""
        return (
            self.steps - self._asked_at < RESTING_STEPS
            and 4 * abs(len(deciding) - self._asked_for) <= self._asked_for
            and all(s.request.depth is None for s in deciding)
        )

    def _want(self, index: int, sequence: Sequence) -> _Want | None:
        """The most promising proposer that has something to offer, in the order they are given."""
        cap = sequence.remaining - 1
        if sequence.request.depth is not None:
            cap = min(cap, sequence.request.depth)
        if cap <= 0:
            return None
        best: _Want | None = None
        for proposer in self.proposers:
            limit = min(cap, proposer.available(sequence))
            if limit <= 0:
                continue
            if self._estimate(proposer, sequence).rate >= _POOR_ACCEPTANCE:
                return _Want(index, sequence, proposer, limit)
            best = best or _Want(index, sequence, proposer, limit)
        return best

    def _depths(self, wants: Seq[_Want], deciding: int) -> list[int]:
        """A fixed depth is taken as asked, as far as a step goes; the rest by marginal gain."""
        depths, left = [0] * len(wants), self.max_draft_tokens
        for i, want in enumerate(wants):
            if want.sequence.request.depth is not None:
                depths[i] = min(want.limit, left)
                left -= depths[i]
        free = [i for i, w in enumerate(wants) if w.sequence.request.depth is None]
        if not free or self.in_control_window:
            return depths
        if not self.verify_time.has_slope:
            # What a further row costs is not known yet: now and then a step with one each tells.
            for i in free:
                depths[i] = int(self.steps % PROBE_EVERY_STEPS == 0)
            return depths
        others = deciding - len(free)
        decision = choose_depths(
            [
                Candidate(
                    limit=wants[i].limit,
                    acceptance=self._estimate(wants[i].proposer, wants[i].sequence).rate,
                    needs_draft_model=wants[i].proposer.pass_time is not None,
                )
                for i in free
            ],
            self._cost(others),
            left,
        )
        if not any(decision.depths):
            self._asked_at, self._asked_for = self.steps, deciding
        for i, depth in zip(free, decision.depths, strict=True):
            depths[i] = depth
        return depths

    def _cost(self, others: int) -> StepCost:
        """What a step costs now that decides for `others` sequences of fixed depth too."""
        draft = next((p.pass_time for p in self.proposers if p.pass_time is not None), None)
        return StepCost(
            verify_base_sec=self.verify_time.base_sec + others * self.verify_time.row_sec,
            verify_row_sec=self.verify_time.row_sec,
            draft_base_sec=draft.base_sec if draft else 0.0,
            draft_row_sec=draft.row_sec if draft else 0.0,
        )

    def _estimate(self, proposer: Proposer, sequence: Sequence) -> Acceptance:
        key = (proposer.name, sequence)
        if key not in self._own:
            overall = self._overall.get(proposer.name)
            self._own[key] = Acceptance(prior=overall.rate) if overall else Acceptance()
        return self._own[key]
