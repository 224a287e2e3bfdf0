"""Stop strings: found token by token while the engine decides, cut off when the text is made.

A completion ends with its first token, from `min_tokens` on, whose text completes one of the
strings. That is a function of the tokens alone, so it is the same at any depth. Strings that were
completed before `min_tokens` do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how a character looks before its last byte
_MAX_PENDING = 16  # tokens that may wait for one character


class TextStop:
    """Watches one completion. Call it with every token, in order."""

    def __init__(self, decode: Decode, stop: Sequence[str], min_tokens: int = 0) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._reach = max(map(len, stop)) - 1  # characters that a string may begin before a token
        self._tokens: list[int] = []
        self._from, self._read = 0, 0  # what is decoded again for context; what has its text
        self._tail = ""  # the last characters of the text so far

    def __call__(self, token: int) -> bool:
        """Whether the completion ends with this token."""
        self._tokens.append(token)
        known = self._decode(self._tokens[self._from : self._read])
        text = self._decode(self._tokens[self._from :])
        fresh = text[len(known) :]
        found = len(self._tokens) >= self._min_tokens and self._completes(fresh.rstrip(_UNFINISHED))
        pending = len(self._tokens) - self._read
        if fresh and (not fresh.endswith(_UNFINISHED) or pending >= _MAX_PENDING):
            self._from, self._read = self._read, len(self._tokens)
            self._tail = (self._tail + fresh)[-self._reach :] if self._reach else ""
        return found

    def _completes(self, fresh: str) -> bool:
        """A string that ends in `fresh`, and that the whole text has as well."""
        if not fresh or not _found(self._tail + fresh, self._stop, len(self._tail)):
            return False
        return bool(_found(self._decode(self._tokens), self._stop, self._floor()))

    def _floor(self) -> int:
        return _floor(self._decode, self._tokens, self._min_tokens)


def text_before_stop(
    decode: Decode, token_ids: Sequence[int], text: str, stop: Sequence[str], min_tokens: int = 0
) -> str:
    """`text`, which is that of the tokens, up to the first stop string that counts."""
    if not stop:
        return text
    places = _found(text, stop, _floor(decode, token_ids, min_tokens))
    return text[: min(places)] if places else text


def _found(text: str, stop: Sequence[str], floor: int) -> list[int]:
    """Where strings begin that end after `floor` characters."""
    places = (text.find(string, max(0, floor - len(string) + 1)) for string in stop)
    return [place for place in places if place >= 0]


def _floor(decode: Decode, token_ids: Sequence[int], min_tokens: int) -> int:
    """Characters of the tokens that come too early to stop.

    Where they end within a character, it is what came before it: some tokenizers decode to nothing
    but U+FFFD also the finished characters that stand right before it.
    """
    early = max(0, min_tokens - 1)
    for end in range(early, max(0, early - _MAX_PENDING), -1):
        text = decode(token_ids[:end])
        if not text.endswith(_UNFINISHED):
            return len(text)
    return len(decode(token_ids[:early]).rstrip(_UNFINISHED))
