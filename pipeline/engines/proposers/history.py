"""Drafts from earlier jobs: what the same prompt gave last time, or what any prompt gave."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from specbatch.pipeline.engines.contract import PastOutputs
from specbatch.pipeline.engines.proposers.block import BlockCursor
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.proposers.suffix_index import (
    LONGEST_CONTEXT,
    SuffixIndex,
    seal,
    unseal,
)
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.schemas.speculation import PastOutput

_KIND = b"specbatch history 1\n"
_HEADER = struct.Struct("<Q")  # bytes of the keys

Key = tuple[str, int]  # row id, sample index
_TAIL = 8  # newest output tokens by which a position in the past output is found again
_NO_RECENT_MISS = 16  # tokens in agreement after which a disagreement is forgotten
_LONG_MATCH = 8
_CLEAR_MAJORITY = 0.75
_PAST, _DOUBTED_PAST = 6, 5  # buckets; 1 to 4 are the index's
SHORTEST_MATCH = 3
_AHEAD = 64  # tokens that are read at once
_REFILL_BELOW = 32
_WORTH_IT = 4  # tokens followed for which a search was worth its time
_MOST_WAITING = 4  # searches in vain after which the wait grows no more: 16 tokens


@dataclass(slots=True)
class _Progress:
    """Where a sequence is in what was written before."""

    cursor: BlockCursor | None  # in its own past output
    index: PastOutputs | None
    walk: IndexWalk | None  # only while the past output has nothing to say
    seen: int  # tokens
    agreed: int  # tokens, since the past output was wrong


class HistoryProposer(Proposer):
    """Follows the request's past output; when that is lost or over, the index of its job."""

    name = "history"

    def __init__(self, vocab_size: int | None = None) -> None:
        """Ignores outputs with tokens outside `vocab_size`: they come from another tokenizer."""
        self._limit = vocab_size
        self._progress: dict[Sequence, _Progress] = {}

    def available(self, sequence: Sequence) -> int:
        progress = self._progress_of(sequence)
        source = progress.cursor if progress.walk is None else progress.walk
        return 0 if source is None else source.remaining()

    def confidence_bucket(self, sequence: Sequence) -> int:
        """6 and 5: the past output, without and with a recent disagreement. 4 to 1: the index, by
        how long the match is (two buckets) and how many of its positions continue like it."""
        progress = self._progress_of(sequence)
        if progress.walk is not None:
            if not progress.walk.length:
                return 0
            long, clear = (
                progress.walk.length >= _LONG_MATCH,
                progress.walk.share >= _CLEAR_MAJORITY,
            )
            return 1 + 2 * long + clear
        if progress.cursor is None or not progress.cursor.remaining():
            return 0
        return _PAST if progress.agreed >= _NO_RECENT_MISS else _DOUBTED_PAST

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        drafts = []
        for sequence, depth in zip(sequences, depths, strict=True):
            progress = self._progress_of(sequence)
            source = progress.cursor if progress.walk is None else progress.walk
            drafts.append([] if source is None else source.draft(depth))
        return drafts

    def forget(self, sequence: Sequence) -> None:
        self._progress.pop(sequence, None)

    # --- a sequence's progress -----------------------------------------------------------------
    def _progress_of(self, sequence: Sequence) -> _Progress:
        """The sequence's progress, brought up to the tokens decided so far."""
        progress = self._progress.get(sequence)
        if progress is None:
            progress = self._progress[sequence] = self._begin(sequence)
        elif progress.seen == len(sequence.tokens):
            return progress
        self._advance(progress, sequence)
        return progress

    def _begin(self, sequence: Sequence) -> _Progress:
        request = sequence.request
        past, index = request.past_ids, request.history
        if past and not self._knows(max(past)):
            past = ()
        if index is not None and not self._knows(index.largest_token):
            index = None
        cursor = BlockCursor(past) if past else None
        return _Progress(cursor, index, None, len(request.prompt_ids), _NO_RECENT_MISS)

    def _knows(self, token: int) -> bool:
        return self._limit is None or token < self._limit

    def _advance(self, progress: _Progress, sequence: Sequence) -> None:
        tokens, seen = sequence.tokens, progress.seen
        new = tokens[seen:]
        progress.seen = len(tokens)
        cursor = progress.cursor
        if cursor is not None:
            if new:
                self._follow(progress, cursor, new, sequence)
            if cursor.remaining():
                progress.walk = None
                return
        if progress.walk is not None:
            progress.walk.follow(new, tokens)
        elif progress.index is not None:
            progress.walk = IndexWalk(progress.index, tokens)

    @staticmethod
    def _follow(
        progress: _Progress, cursor: BlockCursor, new: list[int], sequence: Sequence
    ) -> None:
        at = cursor.at
        fits = at is not None and cursor.block[at : at + len(new)] == tuple(new)
        output_begins = len(sequence.request.prompt_ids)
        tail = sequence.tokens[max(output_begins, len(sequence.tokens) - _TAIL) :]
        cursor.follow(new, tail)
        progress.agreed = progress.agreed + len(new) if fits else 0


class IndexWalk:
    """Follows the position of the longest match. It searches only after a disagreement.

    A search takes longer than all else that is done for a sequence in a step. So each one that
    leads nowhere doubles the tokens that are waited for until the next.
    """

    __slots__ = ("_ahead", "_at", "_in_vain", "_index", "_position", "_since", "length", "share")

    def __init__(self, index: PastOutputs, tokens: list[int]) -> None:
        self._index = index
        self._ahead: list[int] = []  # what the index has from `_position` on
        self._at = 0  # of those, followed
        self._position = 0
        self._since = 0  # tokens since the last search
        self._in_vain = 0  # searches, until one proves worth it
        self.length = 0  # tokens in common, with those followed since; 0: it is nowhere
        self.share = 0.0  # of the positions looked at, those that continue like this one
        self._search(tokens)

    def follow(self, new: list[int], tokens: list[int]) -> None:
        """Advance over `new`, the newest of `tokens`."""
        if self.length:
            end = self._at + len(new)
            if self._ahead[self._at : end] == new:
                self._go_to(end)
                return
            for token in new:
                if self._ahead[self._at : self._at + 1] != [token]:
                    break
                self._go_to(self._at + 1)
            self.length = 0
        self._since += len(new)
        if not self._in_vain or self._since >= 1 << min(self._in_vain - 1, _MOST_WAITING):
            self._search(tokens)

    def remaining(self) -> int:
        return len(self._ahead) - self._at if self.length else 0

    def draft(self, count: int) -> list[int]:
        return self._ahead[self._at : self._at + count] if self.length else []

    def _go_to(self, end: int) -> None:
        followed = end - self._at
        self._at = end
        self._since += followed
        self.length += followed
        if self._since >= _WORTH_IT:
            self._in_vain = 0
        if len(self._ahead) == _AHEAD and _AHEAD - end < _REFILL_BELOW:
            self._read(self._position + end)

    def _search(self, tokens: list[int]) -> None:
        self._since = 0
        self._in_vain += 1
        match = self._index.find(tokens[-LONGEST_CONTEXT:], SHORTEST_MATCH)
        if match is None:
            self.length = 0
            return
        self.length, self.share = match.length, match.share
        self._read(match.position)

    def _read(self, position: int) -> None:
        self._position, self._at = position, 0
        self._ahead = self._index.follow(position, _AHEAD)


class History:
    """An index over past outputs, and which prompt each was for. It never changes.

    The index holds the outputs, equal ones once. Memory: what `SuffixIndex` takes, and about 300
    bytes and the row id for each prompt and sample; there are at most as many as tokens.
    """

    def __init__(self, index: SuffixIndex, numbers: dict[Key, int]) -> None:
        """`numbers`: which of the index's outputs belongs to a key."""
        self.index = index
        self._numbers = numbers

    @classmethod
    def build(cls, past: Iterable[PastOutput], max_tokens: int) -> History:
        """Over `past` in its order until `max_tokens` are taken: the most relevant come first.

        Of several outputs of one prompt and sample the first is its past; empty ones are none.
        """
        numbers: dict[Key, int] = {}
        outputs: dict[tuple[int, ...], int] = {}
        room = max_tokens
        for output in past:
            if room <= 0:
                break
            if not output.token_ids:
                continue
            if output.token_ids not in outputs:
                outputs[output.token_ids] = len(outputs)
                room -= len(output.token_ids)
            key = (output.row_id, output.sample_index)
            numbers.setdefault(key, outputs[output.token_ids])
        return cls(SuffixIndex.build(outputs, max_tokens), numbers)

    def __len__(self) -> int:
        """Prompts and samples whose past is known."""
        return len(self._numbers)

    def past(self, row_id: str, sample: int) -> tuple[int, ...]:
        """What the prompt gave before, or its sample 0; empty if it is not known."""
        number = self._numbers.get((row_id, sample))
        if number is None:
            number = self._numbers.get((row_id, 0))
        return () if number is None else self.index.output(number)

    def to_bytes(self) -> bytes:
        keys = [[row_id, sample, number] for (row_id, sample), number in self._numbers.items()]
        encoded = json.dumps(keys).encode()
        return seal(_KIND, _HEADER.pack(len(encoded)), encoded, self.index.to_bytes())

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> History:
        """Raises ValueError if `data` is not what `to_bytes` made."""
        payload = unseal(_KIND, data)
        if len(payload) < _HEADER.size:
            raise ValueError("a history without its header")
        end = _HEADER.size + int(_HEADER.unpack_from(payload)[0])
        index = SuffixIndex.from_bytes(payload[end:])
        return cls(index, _keys_from(bytes(payload[_HEADER.size : end]), len(index)))


def _keys_from(encoded: bytes, outputs: int) -> dict[Key, int]:
    numbers: dict[Key, int] = {}
    entries = json.loads(encoded)
    if not isinstance(entries, list):
        raise ValueError("a history without a list of keys")
    for entry in entries:
        match entry:
            case [str(row_id), int(sample), int(number)] if 0 <= number < outputs:
                numbers[row_id, sample] = number
            case _:
                raise ValueError(f"a history with a wrong key: {entry}")
    return numbers
