"""Drafts of a candidate model beside those of the model that serves a row, of the same places.

Nobody verifies them: both wait until their places are decided, whoever drafts for the row
meanwhile, and count as far as they are what was decided. Coupled outputs do not depend on drafts,
so neither model has an advantage; ratio tests keep a draft that is likely enough, and there nothing
is compared. Only some sequences are drafted for, in a small share of the engine's time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specbatch.pipeline.engines.exact.proposers.proposer import Proposer
from specbatch.pipeline.engines.exact.speculation.shadow import agreed, is_watched
from specbatch.pipeline.engines.exact.state.sequence import Sequence
from specbatch.pipeline.policy.acceptance import Track
from specbatch.schemas.records import Verification
from specbatch.schemas.speculation import ShadowPair

SHARE = 0.01  # of the time of steps, at most
AT_ONCE = 4  # sequences: a call that reads their prompts first must not hold up a step


@dataclass(slots=True, eq=False)
class Pair:
    """Who is compared on a sequence, from its newest token on."""

    sequence: Sequence
    candidate: Proposer
    serving: Proposer
    depth: int
    drafts: dict[str, list[int]] = field(default_factory=dict)  # by proposer


@dataclass(slots=True)
class _Waiting:
    begin: int  # output tokens there were
    candidate: list[int]
    serving: list[int]  # as many
    track: Track | None  # of the candidate, where it is another model


@dataclass(slots=True)
class Pairs:
    """The drafts in waiting, a pair of a sequence at most, and what they may cost."""

    _waiting: dict[Sequence, _Waiting] = field(default_factory=dict)
    _allowance_sec: float = 0.0
    _busy_sec: float = 0.0  # when it was last asked
    _last_sec: float = 0.0  # what the last drafts took

    def may_draft(self, busy_sec: float) -> bool:
        """Whether there is time for what the last drafts took: more than that is not saved up.

        `busy_sec`: what all steps so far took.
        """
        earned = SHARE * (busy_sec - self._busy_sec)
        self._allowance_sec = min(self._allowance_sec + earned, self._last_sec)
        self._busy_sec = busy_sec
        return self._allowance_sec >= self._last_sec

    def spend(self, sec: float) -> None:
        self._allowance_sec -= sec
        self._last_sec = sec

    def is_due(self, sequence: Sequence) -> bool:
        """Whether it is one of the few, and has no drafts in waiting."""
        request = sequence.request
        return (
            request.candidate is not None
            and is_watched(request.seed)
            and sequence not in self._waiting
            and sequence.verification is Verification.COUPLED
        )

    def keep(self, pair: Pair, track: Track) -> None:
        """Both drafts are there, cut to the shorter. `track`: of the candidate."""
        candidate, serving = pair.drafts[pair.candidate.name], pair.drafts[pair.serving.name]
        both = min(len(candidate), len(serving))
        if both:
            own = None if pair.candidate is pair.serving else track
            at = pair.sequence.num_output
            self._waiting[pair.sequence] = _Waiting(at, candidate[:both], serving[:both], own)

    def compare(self) -> None:
        """Judge the drafts whose places are all decided."""
        over = [s for s, w in self._waiting.items() if s.num_output >= w.begin + len(w.candidate)]
        for sequence in over:
            self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """The sequence ends or is over its drafts: as much of both as is decided is counted."""
        waiting = self._waiting.pop(sequence, None)
        if waiting is None:
            return
        decided = sequence.output[waiting.begin : waiting.begin + len(waiting.candidate)]
        if not decided:
            return
        candidate = agreed(waiting.candidate[: len(decided)], decided)
        serving = agreed(waiting.serving[: len(decided)], decided)
        sequence.shadow_pair += ShadowPair(1, candidate, serving)
        if waiting.track is not None:
            waiting.track.observe(len(decided), candidate)
