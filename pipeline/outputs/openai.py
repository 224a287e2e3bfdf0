"""OpenAI batch output: `output.jsonl` with finished requests, `errors.jsonl` with the others.

Each request is one line with all of its samples as choices. Ids are derived from the job and the
row, so a repeated run writes the same files.

Log-probabilities list each token as text and as bytes. A token's text is what it adds to the whole
text, including the space before a word, which many tokenizers omit at the beginning of a text. A
token that is part of a character reads as a replacement character and has null bytes. Special
tokens have no text. Values that are not finite (of a token that cannot occur) become -9999, as in
OpenAI's files.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson

from specbatch.pipeline.outputs.names import OPENAI
from specbatch.pipeline.outputs.tool_calls import calls_left_in
from specbatch.schemas.openai_formats import CHATS
from specbatch.schemas.records import CompletionRecord, FinishReason, RejectedRow

Decode = Callable[[Sequence[int]], str]
TokenTexts = Callable[[int], dict[str, Any]]

_UNLIKELY = -9999.0
_PARTIAL = "\N{REPLACEMENT CHARACTER}"


def token_texts(decode: Decode | None) -> TokenTexts:
    """The text of each token id, decoded once. Without a decoder all texts are empty."""

    @cache
    def text_of(token: int) -> dict[str, Any]:
        text = decode([token]) if decode else ""
        if decode and _PARTIAL not in text:  # else it depends on the bytes before it
            twice = decode([token, token])
            text = twice[len(text) :] if twice.startswith(text) else text
        whole = bool(text) and _PARTIAL not in text
        return {"token": text, "bytes": list(text.encode()) if whole else None}

    return text_of


def openai_logprobs(record: CompletionRecord, texts: TokenTexts) -> dict[str, Any] | None:
    """The `logprobs` of a choice; null if the request did not ask for them."""
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
    return {**texts(token), "logprob": value if math.isfinite(value) else _UNLIKELY}


_UNFINISHED = (FinishReason.ERROR, FinishReason.CANCELLED)
_FILTERED = "content_filter"  # OpenAI's word for what a content policy keeps back


class OpenAIFiles:
    """Writes both files while rows stream through it."""

    def __init__(
        self,
        folder: Path,
        job_id: str,
        created: int,
        decode: Decode | None = None,
        format: str = CHATS,
    ) -> None:
        self._lines = Lines(job_id, created, decode, format)
        self._paths = (folder / OPENAI[0], folder / OPENAI[1])
        self._counts = [0, 0]

    def watching(
        self, rows: Iterable[CompletionRecord | RejectedRow]
    ) -> Iterator[CompletionRecord | RejectedRow]:
        """Pass rows through; write each request as soon as its last sample has passed."""
        with self._paths[0].open("wb") as output, self._paths[1].open("wb") as errors:
            for _, group in groupby(rows, key=lambda row: row.row_index):
                samples = list(group)
                line = self._lines.line(samples)
                failed = line["error"] is not None
                self._counts[failed] += 1
                (errors if failed else output).write(
                    orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
                )
                yield from samples

    def finish(self) -> list[tuple[Path, int]]:
        """(file, lines) of both files, after all rows have passed."""
        return list(zip(self._paths, self._counts, strict=True))


class Lines:
    """Makes the lines of a job's requests."""

    def __init__(
        self, job_id: str, created: int, decode: Decode | None = None, format: str = CHATS
    ) -> None:
        """`created`: seconds since the epoch; `decode`: of tokens, for log-probabilities;
        `format`: of the requests."""
        self._are_chats = format == CHATS
        self._job_id = job_id
        self._created = created
        self._tokens = token_texts(decode)

    def line(self, samples: Sequence[CompletionRecord | RejectedRow]) -> dict[str, Any]:
        """The line of a request with all of its samples."""
        first = samples[0]
        line = {
            "id": self._id("batch_req_", first.row_index),
            "custom_id": first.row_id,
            "response": None,
            "error": None,
        }
        finished: list[CompletionRecord] = []
        for sample in samples:
            if isinstance(sample, RejectedRow):
                return line | {"error": {"code": sample.code, "message": sample.reason}}
            finished.append(sample)
            if sample.finish_reason in _UNFINISHED:
                code = sample.finish_reason.value
                message = sample.error or f"sample {sample.sample_index} ended as {code}"
                return line | {"error": {"code": code, "message": message}}
        return line | {"response": self._response(finished)}

    def _response(self, samples: list[CompletionRecord]) -> dict[str, Any]:
        first = samples[0]
        generated = sum(len(sample.token_ids) for sample in samples)
        return {
            "status_code": 200,
            "request_id": self._id("req_", first.row_index),
            "body": {
                "id": self._id("chatcmpl-" if self._are_chats else "cmpl-", first.row_index),
                "object": "chat.completion" if self._are_chats else "text_completion",
                "created": self._created,
                "model": first.verifier,
                "choices": [self._choice(i, sample) for i, sample in enumerate(samples)],
                "usage": {
                    "prompt_tokens": first.prompt_tokens,
                    "completion_tokens": generated,
                    "total_tokens": first.prompt_tokens + generated,
                },
            },
        }

    def _id(self, prefix: str, *numbers: int) -> str:
        of = "\0".join([self._job_id, *map(str, numbers)])
        return prefix + hashlib.sha256(of.encode()).hexdigest()[:24]

    def _choice(self, index: int, sample: CompletionRecord) -> dict[str, Any]:
        reason = _FILTERED if sample.is_withheld else sample.finish_reason.value
        if not self._are_chats:
            text = "" if sample.is_withheld else sample.text
            return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
        return {
            "index": index,
            "message": self._message(sample),
            "logprobs": openai_logprobs(sample, self._tokens),
            "finish_reason": reason,
        }

    def _message(self, sample: CompletionRecord) -> dict[str, Any]:
        content = None if sample.is_withheld else sample.text
        message = {"role": "assistant", "content": content, "refusal": None}
        if sample.finish_reason is not FinishReason.TOOL_CALLS:
            return message
        found = calls_left_in(sample.text)
        if found is None:
            return message
        return message | {
            "content": found.content,
            "tool_calls": [
                {
                    "id": self._id("call_", sample.row_index, sample.sample_index, number),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(found.calls)
            ],
        }
