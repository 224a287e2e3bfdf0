"""Finds where in many finished outputs the newest tokens occurred before, and what followed.

The outputs stand in one row, each followed by a separator. Every place that has tokens before and
behind it is sorted by the tokens before it, read backwards: places with the same context are
neighbours, and those with the longest common context stand around where a new context would be.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from specbatch.pipeline.engines.contract import Match

LONGEST_CONTEXT = 32  # tokens by which places are sorted; a power of 2
MOST_TOKENS = 2**28  # offsets into the bytes of the reversed row are int32
_SEPARATOR = -1
_KIND = b"specbatch suffix index 1\n"
_HEADER = struct.Struct("<QQ")  # tokens with separators, places
_LOOKED_AT = 64  # places, evenly spaced, whose next tokens are counted
_NEAR = 64  # neighbours that are tried before the whole index is searched

Int32s = npt.NDArray[np.int32]
_DIGEST_BYTES = 16


class SuffixIndex:
    """Outputs of earlier jobs by what was written before each token. It never changes.

    Memory: 12 bytes per token and separator, 4 per output; about 60 per token while it is built.
    """

    def __init__(self, row: Int32s, offsets: Int32s) -> None:
        """`row`: [tokens + separators]. `offsets`: [places], into the bytes of the reversed row."""
        self._row = row
        self._offsets = offsets
        self._tokens, self._sorted = row.data, offsets.data  # reading one of them is faster
        # Big-endian, so that bytes sort like tokens. The separator is 0 and ends every match, and
        # so does what is behind the last context.
        reverse = (row[::-1] + np.int32(1)).astype(">u4").tobytes()
        self._reverse = reverse + bytes(4 * LONGEST_CONTEXT)
        ends = np.flatnonzero(row == _SEPARATOR)
        self._starts = np.concatenate([[0], ends + 1]).astype(np.int32)  # and one behind the last
        self.largest_token = int(row.max(initial=_SEPARATOR))  # -1: it holds none

    @classmethod
    def build(cls, outputs: Iterable[Sequence[int]], max_tokens: int) -> SuffixIndex:
        """Over `outputs` in their order until `max_tokens` are taken; the last one may be cut.

        Empty ones are left out. Raises ValueError for tokens outside [0, 2**31 - 2].
        """
        if not 0 <= max_tokens <= MOST_TOKENS:
            raise ValueError(f"max_tokens is {max_tokens}, not within 0 and {MOST_TOKENS}")
        taken, room = [], max_tokens
        for output in outputs:
            if room <= 0:
                break
            if output:
                taken.append(_checked(output[:room]))
                room -= len(taken[-1])
        row = np.full(sum(len(tokens) + 1 for tokens in taken), _SEPARATOR, np.int32)
        start = 0
        for tokens in taken:
            row[start : start + len(tokens)] = tokens
            start += len(tokens) + 1
        order = _by_context(row)
        places = order[(row[order] != _SEPARATOR) & (row[order - 1] != _SEPARATOR)]
        return cls(row, (4 * (len(row) - places)).astype(np.int32))

    def __len__(self) -> int:
        """Outputs."""
        return len(self._starts) - 1

    @property
    def num_tokens(self) -> int:
        return len(self._row) - len(self)

    def output(self, number: int) -> tuple[int, ...]:
        """The one that was taken as `number`, from 0 on."""
        start, end = int(self._starts[number]), int(self._starts[number + 1]) - 1
        return tuple(self._row[start:end].tolist())

    def find(self, context: Sequence[int], shortest: int = 1) -> Match | None:
        """The longest suffix of `context` that some output has, with a token behind it.

        None if that is of fewer than `shortest` tokens. Over a million tokens it takes 5 to 20 µs.
        """
        newest = context[-LONGEST_CONTEXT:]
        if not newest or min(newest) < 0 or max(newest) > self.largest_token:
            newest = self._from_the_last_unknown(newest)
        wanted = struct.pack(f">{len(newest)}I", *[token + 1 for token in reversed(newest)])
        reverse, places = self._reverse, self._sorted
        width = len(wanted)
        at = bisect_left(places, wanted, key=lambda offset: reverse[offset : offset + width])
        beside = places[max(0, at - 1) : at + 1]
        length = max((_in_common(wanted, reverse[o : o + width]) for o in beside), default=0)
        if length < max(shortest, 1):
            return None
        first, last = self._range(wanted[: 4 * length], at)
        return self._majority(length, first, last)

    def follow(self, position: int, count: int) -> list[int]:
        """At most `count` tokens from `position` on, to the end of its output."""
        tokens: list[int] = self._row[position : position + count].tolist()
        if _SEPARATOR in tokens:
            del tokens[tokens.index(_SEPARATOR) :]
        return tokens

    def to_bytes(self) -> bytes:
        """8 bytes per token and separator, for `from_bytes`."""
        header = _HEADER.pack(len(self._row), len(self._offsets))
        arrays = (self._row, self._offsets)
        return seal(_KIND, header, *(array.astype("<i4").tobytes() for array in arrays))

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> SuffixIndex:
        """Raises ValueError if `data` is not what `to_bytes` made."""
        payload = unseal(_KIND, data)
        if len(payload) < _HEADER.size:
            raise ValueError("a suffix index without its header")
        tokens, places = _HEADER.unpack_from(payload)
        if len(payload) != _HEADER.size + 4 * (tokens + places):
            raise ValueError("a suffix index whose length does not match its header")
        numbers = np.frombuffer(payload, "<i4", offset=_HEADER.size).astype(np.int32)
        row, offsets = numbers[:tokens], numbers[tokens:]
        if tokens and (row[-1] != _SEPARATOR or row.min() < _SEPARATOR):
            raise ValueError("a suffix index with wrong tokens")
        if places and (offsets.min() <= 0 or offsets.max() > 4 * tokens or (offsets % 4).any()):
            raise ValueError("a suffix index with wrong places")
        return cls(row, offsets)

    # --- a search ------------------------------------------------------------------------------
    def _from_the_last_unknown(self, newest: Sequence[int]) -> Sequence[int]:
        """What stands behind the last token that is in no output."""
        for begin in range(len(newest), 0, -1):
            if not 0 <= newest[begin - 1] <= self.largest_token:
                return newest[begin:]
        return newest

    def _range(self, wanted: bytes, at: int) -> tuple[int, int]:
        """[first, last) of the places whose context begins with `wanted`; `at` is in or beside."""
        reverse, places, width = self._reverse, self._sorted, len(wanted)

        def begin_of(offset: int) -> bytes:
            return reverse[offset : offset + width]

        low, high = max(0, at - _NEAR), min(len(places), at + _NEAR)
        if low and begin_of(places[low]) == wanted:
            low = 0
        if high < len(places) and begin_of(places[high]) == wanted:
            high = len(places)
        first = bisect_left(places, wanted, low, at, key=begin_of)
        last = bisect_right(places, wanted, at, high, key=begin_of)
        return first, last

    def _majority(self, length: int, first: int, last: int) -> Match:
        count, size = last - first, len(self._row)
        if count == 1:
            return Match(length, size - self._sorted[first] // 4, 1.0)
        picked = range(first, last)
        if count > _LOOKED_AT:
            picked = range(first, last, -(-count // _LOOKED_AT))
        positions = [size - self._sorted[place] // 4 for place in picked]
        following = [self._tokens[position] for position in positions]
        votes = Counter(following)
        token = max(votes, key=votes.__getitem__)
        # Of equals the first: outputs are given with the most relevant in front.
        position = min(p for p, t in zip(positions, following, strict=True) if t == token)
        return Match(length, position, votes[token] / len(following))


def _checked(output: Sequence[int]) -> Int32s:
    tokens = np.asarray(output, np.int64)
    if tokens.min() < 0 or tokens.max() > 2**31 - 2:
        raise ValueError("a token is not within 0 and 2**31 - 2")
    return tokens.astype(np.int32)


def _by_context(row: Int32s) -> npt.NDArray[np.int64]:
    """All places by the tokens before them, nearest first, at least LONGEST_CONTEXT of them.

    Prefix doubling: ranks by k tokens, taken in pairs, are ranks by 2k. The separator is a token
    like others here, the smallest, and so is what would be before the row.
    """
    size = len(row)
    rank = np.zeros(size, np.int64)
    rank[1:] = row[:-1] - _SEPARATOR
    order = np.argsort(rank)
    reach = 1
    while reach < LONGEST_CONTEXT and size:
        key = rank * (int(rank.max()) + 1)
        key[reach:] += rank[:-reach]
        order = np.argsort(key)
        ordered = key[order]
        rank[order[0]] = 0
        rank[order[1:]] = np.cumsum(ordered[1:] != ordered[:-1])
        reach *= 2
    return order


def _in_common(one: bytes, other: bytes) -> int:
    """Tokens of 4 bytes each, from the left. Both are of one length."""
    differing = int.from_bytes(one, "big") ^ int.from_bytes(other, "big")
    return (8 * len(one) - differing.bit_length()) // 32


def seal(kind: bytes, *parts: bytes) -> bytes:
    """Join `kind`, a checksum and the parts. A kind names one layout for ever."""
    digest = hashlib.blake2b(kind, digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return b"".join([kind, digest.digest(), *parts])


def unseal(kind: bytes, data: bytes | memoryview) -> memoryview:
    """The bytes that `seal` protected, not copied. Raises ValueError if they are damaged."""
    view = memoryview(data)
    begin = len(kind) + _DIGEST_BYTES
    if view[: len(kind)] != kind:
        raise ValueError(f"not a file of kind {kind.decode('ascii', 'replace')!r}")
    digest = hashlib.blake2b(kind, digest_size=_DIGEST_BYTES)
    digest.update(view[begin:])
    if view[len(kind) : begin] != digest.digest():
        raise ValueError(f"{kind.decode('ascii', 'replace')!r}: the checksum does not match")
    return view[begin:]
