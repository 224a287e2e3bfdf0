"""Drafts from earlier jobs: what the same prompt gave last time, or what any prompt gave."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from specbatch.pipeline.engines.exact.proposers.block_cursor import BlockCursor
from specbatch.pipeline.engines.exact.proposers.index_walk import IndexWalk
from specbatch.pipeline.engines.exact.proposers.suffix_index import SuffixIndex
from specbatch.pipeline.engines.exact.state.sequence import Sequence

_TAIL = 8  # newest output tokens by which a place in the past output is found again
_NO_RECENT_MISS = 16  # tokens in agreement after which a disagreement is forgotten
_LONG_MATCH = 8
_CLEAR_MAJORITY = 0.75
_PAST, _DOUBTED_PAST = 6, 5  # classes; 1 to 4 are the index's


@dataclass(slots=True)
class _Place:
    """Where a sequence is in what was written before."""

    cursor: BlockCursor | None  # in its own past output
    index: SuffixIndex | None
    walk: IndexWalk | None  # only while the past output has nothing to say
    seen: int  # tokens
    agreed: int  # tokens, since the past output was wrong


class HistoryProposer:
    """Follows the request's past output. Where that is lost or over, the index of its job."""

    name = "history"
    pass_time = None

    def __init__(self, vocab_size: int | None = None) -> None:
        """Outputs with tokens outside `vocab_size`, of another tokenizer, are no history."""
        self._limit = vocab_size
        self._places: dict[Sequence, _Place] = {}

    def available(self, sequence: Sequence) -> int:
        place = self._place(sequence)
        if place.walk is not None:
            return place.walk.remaining()
        return 0 if place.cursor is None else place.cursor.remaining()

    def confidence_bucket(self, sequence: Sequence) -> int:
        """6 and 5: the past output, without and with a recent disagreement. 4 to 1: the index, by
        how long the match is (two classes) and how many of its places go on like it."""
        place = self._place(sequence)
        if place.walk is not None:
            if not place.walk.length:
                return 0
            long, clear = place.walk.length >= _LONG_MATCH, place.walk.share >= _CLEAR_MAJORITY
            return 1 + 2 * long + clear
        if place.cursor is None or not place.cursor.remaining():
            return 0
        return _PAST if place.agreed >= _NO_RECENT_MISS else _DOUBTED_PAST

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        drafts = []
        for sequence, depth in zip(sequences, depths, strict=True):
            place = self._place(sequence)
            if place.walk is not None:
                drafts.append(place.walk.draft(depth))
            elif place.cursor is not None and (at := place.cursor.at) is not None:
                drafts.append(list(place.cursor.block[at : at + depth]))
            else:
                drafts.append([])
        return drafts

    def on_verified(self, sequence: Sequence) -> None:
        """Nothing to drop: places follow the tokens that were decided."""

    def forget(self, sequence: Sequence) -> None:
        self._places.pop(sequence, None)

    # --- a sequence's place --------------------------------------------------------------------
    def _place(self, sequence: Sequence) -> _Place:
        """Brought up to the tokens decided so far, by whatever means they were."""
        place = self._places.get(sequence)
        if place is None:
            place = self._places[sequence] = self._begin(sequence)
        elif place.seen == len(sequence.tokens):
            return place
        self._advance(place, sequence)
        return place

    def _begin(self, sequence: Sequence) -> _Place:
        request = sequence.request
        past, index = request.past_ids, request.history
        if past and not self._knows(max(past)):
            past = ()
        if index is not None and not self._knows(index.largest_token):
            index = None
        cursor = BlockCursor(past) if past else None
        return _Place(cursor, index, None, len(request.prompt_ids), _NO_RECENT_MISS)

    def _knows(self, token: int) -> bool:
        return self._limit is None or token < self._limit

    def _advance(self, place: _Place, sequence: Sequence) -> None:
        tokens, seen = sequence.tokens, place.seen
        new = tokens[seen:]
        place.seen = len(tokens)
        cursor = place.cursor
        if cursor is not None:
            if new:
                self._follow(place, cursor, new, sequence)
            if cursor.remaining():
                place.walk = None
                return
        if place.walk is not None:
            place.walk.follow(new, tokens)
        elif place.index is not None:
            place.walk = IndexWalk(place.index, tokens)

    @staticmethod
    def _follow(place: _Place, cursor: BlockCursor, new: list[int], sequence: Sequence) -> None:
        at = cursor.at
        fits = at is not None and cursor.block[at : at + len(new)] == tuple(new)
        output_begins = len(sequence.request.prompt_ids)
        tail = sequence.tokens[max(output_begins, len(sequence.tokens) - _TAIL) :]
        cursor.follow(new, tail)
        place.agreed = place.agreed + len(new) if fits else 0
