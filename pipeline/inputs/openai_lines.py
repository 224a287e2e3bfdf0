"""Reads a line of an OpenAI batch file: a chat, or a completion of plain text.

A body of `/v1/completions` has one prompt, a text or a list of token ids. Its fields mean the same
as those of a chat's body. What only that endpoint has is refused by name, unless it changes
nothing.
"""

from __future__ import annotations

from typing import Any

from specbatch.pipeline.inputs.contract import RawRow, RowError
from specbatch.schemas.openai_formats import COMPLETIONS, URLS

# Fields of completions that change nothing at these values, and fields that only chats have.
_NEUTRAL: dict[str, tuple[Any, ...]] = {"echo": (False,), "best_of": (1,), "suffix": ("",)}
_OF_CHATS = ("messages", "tools", "tool_choice", "parallel_tool_calls")


def read_line(value: dict[str, Any], tag: Any, format: str) -> RawRow:
    """The row of a line, or what is wrong with it."""
    row = RawRow(id=value.get("custom_id"), tag=tag)
    body, url, method = value.get("body"), value.get("url"), value.get("method")
    if row.id is None or row.id == "":
        row.problem = ("bad_parameter", "custom_id is missing")
    elif not isinstance(body, dict):
        row.problem = ("bad_json", "body is not a JSON object")
    elif url not in (None, URLS[format]) or method not in (None, "POST"):
        row.problem = ("unsupported_parameter", f"only POST {URLS[format]} is supported")
    elif format == COMPLETIONS:
        _read_completion(row, body)
    else:
        row.body, row.prompt = body, body.get("messages")
    return row


def _read_completion(row: RawRow, body: dict[str, Any]) -> None:
    try:
        row.prompt = _prompt(body.get("prompt"))
        row.body = _plain(body)
    except RowError as error:
        row.problem = (error.code, str(error))


def _prompt(prompt: Any) -> Any:
    if isinstance(prompt, list) and any(isinstance(item, str | list | dict) for item in prompt):
        raise RowError(
            "wrong_type",
            "prompt is one text or one list of token ids: write a line for each prompt",
        )
    return prompt


def _plain(body: dict[str, Any]) -> dict[str, Any]:
    """The body without what only completions have."""
    for name in _OF_CHATS:
        if body.get(name) is not None:
            raise RowError(
                "unsupported_parameter", f"`{name}` is for {URLS['openai']}: send a chat instead"
            )
    for name, values in _NEUTRAL.items():
        if body.get(name) is not None and not any(body[name] == value for value in values):
            raise RowError("unsupported_parameter", f"`{name}` is not supported")
    if body.get("logprobs") is not None:
        raise RowError(
            "unsupported_parameter", f"`logprobs` is not supported of {URLS[COMPLETIONS]}"
        )
    dropped = ("prompt", "logprobs", *_NEUTRAL)
    return {name: value for name, value in body.items() if name not in dropped}
