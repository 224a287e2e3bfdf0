"""Where in the index of past outputs a sequence goes on."""

from __future__ import annotations

from specbatch.pipeline.engines.exact.proposers.suffix_index import LONGEST_CONTEXT, SuffixIndex

SHORTEST_MATCH = 3
_AHEAD = 64  # tokens that are read at once
_REFILL_BELOW = 32
_WORTH_IT = 4  # tokens followed for which a search was worth its time
_MOST_WAITING = 4  # searches in vain after which the wait grows no more: 16 tokens


class IndexWalk:
    """Follows the place of the longest match. It searches only after a disagreement.

    A search takes longer than all else that is done for a sequence in a step. So each one that
    leads nowhere doubles the tokens that are waited for until the next.
    """

    __slots__ = ("_ahead", "_at", "_in_vain", "_index", "_position", "_since", "length", "share")

    def __init__(self, index: SuffixIndex, tokens: list[int]) -> None:
        self._index = index
        self._ahead: list[int] = []  # what the index has from `_position` on
        self._at = 0  # of those, followed
        self._position = 0
        self._since = 0  # tokens since the last search
        self._in_vain = 0  # searches, until one proves worth it
        self.length = 0  # tokens in common, with those followed since; 0: it is nowhere
        self.share = 0.0  # of the places looked at, those that went on like this one
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
