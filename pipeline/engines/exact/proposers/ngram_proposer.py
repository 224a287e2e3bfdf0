"""Drafts from the sequence itself: what followed its newest tokens when they occurred before."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from specbatch.pipeline.engines.exact.proposers.match_finder import MatchFinder
from specbatch.pipeline.engines.exact.state.sequence import Sequence

_HIGHEST_GRADE = 5


class NgramProposer:
    """Goes on like the most recent of the longest matches in prompt and output so far.

    A sequence's index is brought up to date when it is asked for, and costs nothing before that.
    It holds about 100 bytes per token.
    """

    name = "ngram"
    pass_time = None

    def __init__(self) -> None:
        self._finders: dict[Sequence, MatchFinder] = {}

    def available(self, sequence: Sequence) -> int:
        return self._finder(sequence).available

    def confidence_bucket(self, sequence: Sequence) -> int:
        """By tokens in common: 2 are class 1, then up to 4, 8, 16 and more."""
        length = self._finder(sequence).length
        return min(_HIGHEST_GRADE, (length - 1).bit_length()) if length else 0

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        drafts = []
        for sequence, depth in zip(sequences, depths, strict=True):
            finder = self._finder(sequence)
            drafts.append(finder.draft(min(depth, finder.available)))
        return drafts

    def on_verified(self, sequence: Sequence) -> None:
        """Nothing to drop: the finder reads the tokens that were decided."""

    def forget(self, sequence: Sequence) -> None:
        self._finders.pop(sequence, None)

    def _finder(self, sequence: Sequence) -> MatchFinder:
        finder = self._finders.get(sequence)
        if finder is None:
            finder = self._finders[sequence] = MatchFinder(sequence.tokens)
        finder.update()
        return finder
