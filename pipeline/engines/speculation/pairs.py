"""Drafts of a candidate model beside those of the model that serves a row, of the same places.

Nobody verifies them: both wait until their places are decided, whoever drafts for the row
meanwhile, and count as far as they are what was decided. Coupled outputs do not depend on drafts;
ratio tests keep a draft that is likely enough, and there nothing is compared. Only some sequences
are drafted for, in a small share of the engine's time.

Passes begin where the serving model was refused, more often where it does badly, and there any
other model looks better. So places are drawn from the seed before their text is written, and drafts
of the row end at them: neither model has an advantage.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.speculation.shadow import agreed, is_watched
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.policy.acceptance import Track
from specbatch.schemas.records import Verification
from specbatch.schemas.seeds import draft_seed
from specbatch.schemas.speculation import ShadowPair

# Of the time of steps, at most. A verdict takes some hundred pairs, whatever time they are spread
# over, and a candidate that reads a prompt should draft at many of its places.
SHARE = 0.1
SAVED = 4  # calls that unused time is kept for: places come in bursts
APART = 16  # output tokens to the next place, at most
ANY_DEPTH = 1 << 30
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
    _places: dict[Sequence, int] = field(default_factory=dict)  # output tokens before the next one
    _allowance_sec: float = 0.0
    _busy_sec: float = 0.0  # when it was last asked
    _last_sec: float = 0.0  # what the last drafts took

    def may_draft(self, busy_sec: float) -> bool:
        """Whether there is time for what the last drafts took. Little more is saved up.

        `busy_sec`: what all steps so far took.
        """
        earned = SHARE * (busy_sec - self._busy_sec)
        self._allowance_sec = min(self._allowance_sec + earned, SAVED * self._last_sec)
        self._busy_sec = busy_sec
        return self._allowance_sec >= self._last_sec

    def spend(self, sec: float) -> None:
        self._allowance_sec -= sec
        self._last_sec = sec

    def is_due(self, sequence: Sequence) -> bool:
        """Whether it is one of the few, has no drafts in waiting, and is at its place.

        To be asked before each of its passes: it also draws the next place.
        """
        request = sequence.request
        may_be = (
            request.candidate is not None
            and is_watched(request.seed)
            and sequence not in self._waiting
            and sequence.verification is Verification.COUPLED
        )
        if not may_be:
            return False
        at = sequence.num_output
        place = self._places.get(sequence, 0)
        if place <= at:
            self._places[sequence] = at + 1 + draft_seed(request.seed, at) % APART
        return place == at

    def room(self, sequence: Sequence) -> int:
        """Draft tokens that its next pass may have, to end at its place at the latest."""
        place = self._places.get(sequence, -1)
        return place - sequence.num_output - 1 if place > sequence.num_output else ANY_DEPTH

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
            self._judge(sequence)

    def forget(self, sequence: Sequence) -> None:
        """The sequence ends: as much of its drafts as is decided is counted."""
        self._places.pop(sequence, None)
        self._judge(sequence)

    def _judge(self, sequence: Sequence) -> None:
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
