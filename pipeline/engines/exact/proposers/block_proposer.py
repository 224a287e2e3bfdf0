"""Drafts from the propose stage: a long continuation made beforehand, followed while it fits.

Where a block runs low, or its sequence is lost in it, somebody may be asked to go on with it
(`wanting`); the answer (`extend`) comes when it comes, or never.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from specbatch.pipeline.engines.exact.proposers.block_cursor import TAIL, BlockCursor
from specbatch.pipeline.engines.exact.state.sequence import Sequence
from specbatch.schemas.speculation import PRE_GENERATED

LOW_WATER = 8  # block tokens left, below which more are wanted
LOST_FOR = 16  # tokens decided without a place in the block, after which another is wanted
ASK_AGAIN_AFTER = 64  # tokens decided without an answer, beyond twice what is usual
WANTED_AT_ONCE = 8  # in one step
MOST_LATE = 256  # tokens by which answers are expected to be late, at most
_NEWEST = 0.25  # weight of the newest answer in how late they are


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request whose output should be guessed on from here."""

    request_id: str
    output: tuple[int, ...]
    late: int = 0  # tokens that will be decided by the time of an answer: to be guessed besides


@dataclass(slots=True)
class _Place:
    """A sequence in its block."""

    cursor: BlockCursor
    seen: int = 0  # output tokens it was led along
    drafted: bool = False  # from this block: only then is more of its kind worth asking for
    asked_at: int | None = None  # output tokens there were

    def wants(self, late: float) -> bool:
        """Early enough for an answer that is `late`, unless that is most of the block."""
        enough = max(LOW_WATER, min(late, len(self.cursor.block) / 2))
        low = self.cursor.remaining() < enough
        lost = self.cursor.at is None and self.cursor.lost_for < LOST_FOR  # it may yet be found
        patience = ASK_AGAIN_AFTER + 2 * late
        waits = self.asked_at is not None and self.seen < self.asked_at + patience
        return low and self.drafted and not lost and not waits


class BlockProposer:
    """Proposes from each request's own pre-generated block."""

    name = PRE_GENERATED
    pass_time = None

    def __init__(self) -> None:
        self._places: dict[Sequence, _Place] = {}
        self._low: dict[Sequence, None] = {}  # in the order in which they ran low
        self._late = 0.0  # tokens that are decided between a question and its answer

    def available(self, sequence: Sequence) -> int:
        if not sequence.request.draft_ids and sequence not in self._places:
            return 0
        return self._place(sequence).cursor.remaining()

    def confidence_bucket(self, sequence: Sequence) -> int:  # noqa: ARG002 - the contract's
        return 0

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        drafts = []
        for sequence, depth in zip(sequences, depths, strict=True):
            place = self._place(sequence)
            place.drafted = True
            at = place.cursor.at
            drafts.append([] if at is None else list(place.cursor.block[at : at + depth]))
        return drafts

    def on_verified(self, sequence: Sequence) -> None:
        """Nothing to drop: the cursor follows the output itself."""

    def forget(self, sequence: Sequence) -> None:
        self._places.pop(sequence, None)
        self._low.pop(sequence, None)

    # --- more of a block -----------------------------------------------------------------------
    def wanting(self) -> list[Wanted]:
        """Some of those that need more, each told once until it is extended, or until
        some time went by without that."""
        wanted: list[Wanted] = []
        while self._low and len(wanted) < WANTED_AT_ONCE:
            sequence = next(iter(self._low))
            del self._low[sequence]
            self._places[sequence].asked_at = sequence.num_output
            if sequence.remaining > LOW_WATER:  # else it is over before an answer is there
                output = tuple(sequence.output)
                wanted.append(Wanted(sequence.request.request_id, output, round(self._late)))
        return wanted

    def extend(self, sequence: Sequence, position: int, token_ids: Seq[int]) -> bool:
        """`token_ids` may follow the sequence's first `position` output tokens. It may be further
        by now; False: this leads no further than what is there."""
        if sequence.finish_reason is not None or not 0 <= position <= sequence.num_output:
            return False
        place = self._place(sequence)
        output = sequence.output
        late = min(len(output) - position, MOST_LATE)
        self._late += _NEWEST * (late - self._late)
        cursor = BlockCursor(tuple(token_ids))
        cursor.follow(output[position:], output[-TAIL:])
        if cursor.remaining() <= place.cursor.remaining():
            return False
        self._places[sequence] = _Place(cursor, len(output))
        self._low.pop(sequence, None)
        return True

    def _place(self, sequence: Sequence) -> _Place:
        """Its place, brought up to the output decided so far, by whatever means it was."""
        place = self._places.get(sequence)
        if place is None:
            place = self._places[sequence] = _Place(BlockCursor(sequence.request.draft_ids))
        decided = sequence.num_output
        if place.seen < decided:
            tokens, prompt = sequence.tokens, len(sequence.request.prompt_ids)
            tail = tokens[max(prompt, len(tokens) - TAIL) :]
            place.cursor.follow(tokens[prompt + place.seen :], tail)
            place.seen = decided
            if place.wants(self._late):
                self._low[sequence] = None
        return place
