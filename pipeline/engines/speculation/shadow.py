"""Drafts that nobody verifies: they wait until depth 0 has decided the same positions.

That counts acceptance exactly, for a draft is accepted where it is what depth 0 decides, and costs
nothing but the drafting. Only some sequences are drafted for: of jobs that ask for it, and now and
then one while drafting rests.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.policy.acceptance import Track

SHARE = 4  # one sequence in so many
DEPTH = 8
DEPTH_AT_REST = 2  # most first tokens are refused then, and nothing behind one is a test
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: multiples of it are spread evenly


def is_watched(seed: int) -> bool:
    """Whether a request is one of the few; no pattern in seeds makes it all of them, or none."""
    return (seed * _GOLDEN % 2**64) * SHARE >> 64 == 0


def agreed(draft: Seq[int], decided: Seq[int]) -> int:
    """Draft tokens before the first that is not what was decided; of equally many."""
    pairs = zip(draft, decided, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(draft))


@dataclass(slots=True)
class _Waiting:
    begin: int  # output tokens there were
    draft: list[int]
    track: Track


@dataclass(slots=True)
class Shadow:
    """The drafts in waiting. A sequence has one at most.

    `tells_completions`: they have the counts too, which outputs keep. Those of samples depend on
    the time, and outputs must not.
    """

    tells_completions: bool = True

    _waiting: dict[Sequence, _Waiting] = field(default_factory=dict)

    def is_due(self, sequence: Sequence) -> bool:
        """Whether it is one of the few, and has no draft in waiting."""
        request = sequence.request
        return request.shadow and is_watched(request.seed) and sequence not in self._waiting

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def keep(self, sequence: Sequence, proposer: Proposer, draft: list[int], track: Track) -> None:
        """A draft behind the sequence's newest token. Its proposer drops its traces at once."""
        proposer.on_verified(sequence)
        if draft:
            self._waiting[sequence] = _Waiting(sequence.num_output, draft, track)

    def compare(self) -> None:
        """Judge the drafts whose positions are all decided."""
        over = [s for s, w in self._waiting.items() if s.num_output >= w.begin + len(w.draft)]
        for sequence in over:
            self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """The sequence ends or is over its draft: as much of it as is decided is counted."""
        waiting = self._waiting.pop(sequence, None)
        if waiting is None:
            return
        decided = sequence.output[waiting.begin : waiting.begin + len(waiting.draft)]
        draft = waiting.draft[: len(decided)]
        accepted = agreed(draft, decided)
        waiting.track.observe(len(draft), accepted)
        if self.tells_completions:
            sequence.shadow_proposed += len(draft)
            sequence.shadow_accepted += accepted
