"""A grammar of which everything is known: the last token decides which third of them may come."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Thirds:
    """Behind token t come the tokens of t's third, and at the beginning those of third 0."""

    vocab_size: int
    end_ids: tuple[int, ...] = ()

    def begin(self) -> _State:
        return _State(self.vocab_size)


@dataclass
class _State:
    vocab_size: int
    tokens: list[int] = field(default_factory=list)

    def append(self, token: int) -> None:
        assert token in self._allowed(self.tokens)
        self.tokens.append(token)

    def masks(self, allowed: NDArray[np.int32], draft: Seq[int], first: int) -> None:
        for row, bits in enumerate(allowed):
            context = [*self.tokens, *draft[: first + row]]
            for at in range(len(self.tokens), len(context)):
                if context[at] not in self._allowed(context[:at]):
                    return
            bits[:] = 0
            for token in self._allowed(context):
                bits[token // 32] |= np.uint32(1 << token % 32).astype(np.int32)

    def forced(self) -> list[int]:
        return []

    def _allowed(self, context: Seq[int]) -> range:
        third = (context[-1] * 7 + len(context)) % 3 if context else 0
        return range(third, self.vocab_size, 3)
