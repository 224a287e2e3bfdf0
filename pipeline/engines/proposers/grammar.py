"""Drafts the tokens that a grammar forces: a key of a JSON schema, the brace behind it.

The verifier decides them like all others, in the pass that it makes anyway. Where a text is forced
its mask has but the token that the tokenizer would write, so nearly all of them are accepted.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.state.sequence import Sequence


class GrammarProposer(Proposer):
    """Knows what must follow where a sequence has a grammar, and says nothing elsewhere."""

    name = "grammar"

    def __init__(self) -> None:
        self._forced: dict[Sequence, tuple[int, Seq[int]]] = {}  # at so many tokens

    def available(self, sequence: Sequence) -> int:
        return len(self._of(sequence))

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        return [list(self._of(s)[:depth]) for s, depth in zip(sequences, depths, strict=True)]

    def forget(self, sequence: Sequence) -> None:
        self._forced.pop(sequence, None)

    def _of(self, sequence: Sequence) -> Seq[int]:
        if sequence.grammar is None:
            return ()
        at, forced = self._forced.get(sequence, (-1, ()))
        if at != len(sequence.tokens):
            forced = sequence.grammar.forced()
            self._forced[sequence] = len(sequence.tokens), forced
        return forced
