"""Penalties, logit biases and bad words of a request, updated token by token.

Nothing here exists for requests that use none of it. A row of a verify block has the draft
tokens before it as context; they are appended for the row and taken back.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from specbatch.schemas.records import SamplingParams

Ids = NDArray[np.int64]
Reals = NDArray[np.float32]

_ROOM = 64  # slots made at a time


class Adjuster:
    """Repetition, presence and frequency penalties and the logit bias of one sequence.

    One slot per distinct token that is adjusted: appending is O(1), a row O(distinct tokens).
    """

    def __init__(self, params: SamplingParams, prompt_ids: Seq[int]) -> None:
        self._params = params
        self._bias = dict(params.logit_bias)
        self._counts_output = has_penalties(params)
        self._in_prompt = frozenset(prompt_ids if params.repetition_penalty != 1 else ())
        known = sorted(self._in_prompt | self._bias.keys())
        self._initial = self._size = len(known)
        self._slots = {token: slot for slot, token in enumerate(known)}
        self._tokens: Ids = np.zeros(len(known) + _ROOM, dtype=np.int64)
        self._tokens[: self._size] = known
        self._scale: Reals = np.ones(len(self._tokens), dtype=np.float32)
        self._add: Reals = np.zeros(len(self._tokens), dtype=np.float32)
        self._counts: Ids = np.zeros(len(self._tokens), dtype=np.int64)
        for slot in range(self._size):
            self._update(slot)

    def append(self, token: int) -> None:
        """The output has one more token."""
        if not self._counts_output:
            return
        slot = self._slots.get(token)
        if slot is None:
            slot = self._new_slot(token)
        self._counts[slot] += 1
        self._update(slot)

    def take_back(self, token: int) -> None:
        """Undo the last `append`, which was of this token."""
        if not self._counts_output:
            return
        slot = self._slots[token]
        self._counts[slot] -= 1
        self._update(slot)
        if not self._counts[slot] and slot >= self._initial:  # made by that append: the last one
            del self._slots[token]
            self._size -= 1

    def rows(self, draft: Seq[int], first: int, count: int) -> list[tuple[Ids, Reals, Reals]]:
        """(tokens, scale, add) where draft[:first], draft[:first + 1], … follow the output."""
        made = []
        for before in range(first + count):
            if before:
                self.append(draft[before - 1])
            if before >= first:
                of = slice(self._size)
                made.append((self._tokens[of].copy(), self._scale[of].copy(), self._add[of].copy()))
        for token in reversed(draft[: max(first + count - 1, 0)]):
            self.take_back(token)
        return made

    def _new_slot(self, token: int) -> int:
        slot = self._size
        if slot == len(self._tokens):
            longer = slot + max(_ROOM, slot // 2)
            self._tokens = np.resize(self._tokens, longer)
            self._scale = np.resize(self._scale, longer)
            self._add = np.resize(self._add, longer)
            self._counts = np.resize(self._counts, longer)
        self._slots[token] = slot
        self._tokens[slot], self._counts[slot] = token, 0
        self._size += 1
        return slot

    def _update(self, slot: int) -> None:
        params, token, count = self._params, int(self._tokens[slot]), int(self._counts[slot])
        seen = count > 0 or token in self._in_prompt
        self._scale[slot] = params.repetition_penalty if seen else 1.0
        penalty = params.presence_penalty * (count > 0) + params.frequency_penalty * count
        self._add[slot] = self._bias.get(token, 0.0) - penalty


class BadWords:
    """Tokens that are always forbidden, and those forbidden after certain others."""

    def __init__(self, params: SamplingParams) -> None:
        single = {word[0] for word in params.bad_words if len(word) == 1}
        self._always: Ids = np.array(sorted({*params.bad_token_ids, *single}), dtype=np.int64)
        self._after: dict[int, list[tuple[int, ...]]] = {}  # by the last token but one
        for word in params.bad_words:
            if len(word) > 1:
                self._after.setdefault(word[-2], []).append(word)
        self._reach = max((len(word) - 1 for word in params.bad_words), default=0)

    def rows(self, tokens: Seq[int], draft: Seq[int], first: int, count: int) -> list[Ids]:
        """Forbidden tokens where draft[:first], draft[:first + 1], … follow `tokens`."""
        if not self._after:
            return [self._always] * count
        context = [*tokens[-self._reach :], *draft]
        begin = len(context) - len(draft) + first
        return [self._row(context[:end]) for end in range(begin, begin + count)]

    def _row(self, context: list[int]) -> Ids:
        ended = [
            word[-1]
            for word in self._after.get(context[-1], ())
            if tuple(context[-(len(word) - 1) :]) == word[:-1]
        ]
        return np.union1d(self._always, np.array(ended, dtype=np.int64)) if ended else self._always


def has_penalties(params: SamplingParams) -> bool:
    """Whether the tokens so far change the next logits."""
    return (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )
