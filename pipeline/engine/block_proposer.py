"""Drafts from the propose stage: a long continuation made beforehand, followed while it fits.

While the output follows the block, the next block tokens are the draft. After a disagreement the
block is first read on as if one token had been replaced. If that fails too, the last output tokens
are looked up in the block, and the nearest place behind which they occur becomes the new place.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from specbatch.pipeline.engine.sequence import Sequence

_CONTEXT = 3  # output tokens that must match to resume elsewhere in the block


@dataclass(slots=True)
class BlockCursor:
    """Where in its block a sequence is. `at` None: lost, until a context matches again."""

    block: tuple[int, ...]
    at: int | None = 0
    expected: int = 0  # where the sequence would be if every mismatch were a replacement
    misses: int = 0
    _places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def follow(self, new_tokens: Seq[int], output: Seq[int]) -> None:
        """Advance over `new_tokens`, the newest of `output`."""
        for token in new_tokens:
            fits = (
                self.at is not None and self.at < len(self.block) and self.block[self.at] == token
            )
            self.expected += 1
            if fits:
                assert self.at is not None, "implied by fits"
                self.at += 1
                self.misses = 0
            elif self.at is not None:
                self.misses += 1
                self.at = self.at + 1 if self.misses == 1 else None
        if self.at is None:
            self._realign(output)

    def remaining(self) -> int:
        return 0 if self.at is None else max(0, len(self.block) - self.at)

    def _realign(self, output: Seq[int]) -> None:
        if len(output) < _CONTEXT:
            return
        if not self._places:
            for i in range(len(self.block) - _CONTEXT):
                self._places.setdefault(self.block[i : i + _CONTEXT], []).append(i + _CONTEXT)
        places = self._places.get(tuple(output[-_CONTEXT:]))
        if places:
            self.at = min(places, key=lambda place: abs(place - self.expected))
            self.expected = self.at
            self.misses = 0


class BlockProposer:
    """Proposes from each request's own pre-generated block."""

    name = "block"
    pass_time = None

    def __init__(self) -> None:
        self._cursors: dict[Sequence, tuple[BlockCursor, int]] = {}  # and the output it has seen

    def available(self, sequence: Sequence) -> int:
        if not sequence.request.draft_ids:
            return 0
        return self._cursor(sequence).remaining()

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        drafts = []
        for sequence, depth in zip(sequences, depths, strict=True):
            cursor = self._cursor(sequence)
            at = cursor.at
            drafts.append([] if at is None else list(cursor.block[at : at + depth]))
        return drafts

    def settle(self, sequence: Sequence) -> None:
        """Nothing to drop: the cursor follows the output itself."""

    def forget(self, sequence: Sequence) -> None:
        self._cursors.pop(sequence, None)

    def _cursor(self, sequence: Sequence) -> BlockCursor:
        """The cursor, brought up to the output decided so far, by whatever means it was."""
        cursor, seen = self._cursors.get(sequence) or (BlockCursor(sequence.request.draft_ids), 0)
        if seen < sequence.num_output or sequence not in self._cursors:
            output = sequence.output
            cursor.follow(output[seen:], output)
            self._cursors[sequence] = (cursor, len(output))
        return cursor
