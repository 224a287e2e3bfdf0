"""Log-probabilities as OpenAI's chat completions tell them: each token as text and as bytes.

A token reads what it adds to a text: also the space before a word, which many tokenizers leave out
where a text begins. It may be part of a character: its text then has a replacement character, and
its bytes are null. Special tokens have no text. What is no finite number (a token that cannot come)
is -9999, as OpenAI has it for what is very unlikely.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from specbatch.schemas.records import CompletionRecord

Decode = Callable[[Sequence[int]], str]

_UNLIKELY = -9999.0
_PARTIAL = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """What each token id reads, decoded once. Without a decoder nothing does."""

    def __init__(self, decode: Decode | None) -> None:
        self._decode = decode
        self._known: dict[int, dict[str, Any]] = {}

    def of(self, token: int) -> dict[str, Any]:
        if token not in self._known:
            text = self._text(self._decode, token) if self._decode else ""
            whole = bool(text) and _PARTIAL not in text
            self._known[token] = {"token": text, "bytes": list(text.encode()) if whole else None}
        return self._known[token]

    @staticmethod
    def _text(decode: Decode, token: int) -> str:
        once = decode([token])
        if _PARTIAL in once:  # what it adds depends on the bytes before
            return once
        twice = decode([token, token])
        return twice[len(once) :] if twice.startswith(once) else once


def openai_logprobs(record: CompletionRecord, texts: TokenTexts) -> dict[str, Any] | None:
    """The `logprobs` of a choice; null where the request did not ask."""
    if record.top_logprobs is None:
        return None
    return {
        "content": [
            _entry(token, value, texts)
            | {"top_logprobs": [_entry(*pair, texts) for pair in zip(*tops, strict=True)]}
            for token, value, tops in zip(
                record.token_ids, record.logprobs, record.top_logprobs, strict=True
            )
        ],
        "refusal": None,
    }


def _entry(token: int, value: float, texts: TokenTexts) -> dict[str, Any]:
    return {**texts.of(token), "logprob": value if math.isfinite(value) else _UNLIKELY}
