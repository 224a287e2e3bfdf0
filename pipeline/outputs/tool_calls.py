"""Reads the calls of functions that an output's text has, in the forms that `schemas/tools.py`
shows. What held the text to them wrote one space behind each comma and colon."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from specbatch.schemas.tools import TAGS

_DECODER = json.JSONDecoder()
_WHITE = " \t\r\n"
_BEGINS = re.compile(r'[ \t\r\n]*(\[?)\{"name"')
_TAG, _END_TAG = TAGS


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments`: the text of a JSON object, as it was written."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Calling:
    """An output with calls. `content`: its text before them; None: there is none."""

    content: str | None
    calls: tuple[ToolCall, ...]


def calls_in(text: str) -> Calling | None:
    """The calls of a text; None if it has none. Raises `ValueError` for a call that is cut."""
    if (begin := _BEGINS.match(text)) is not None:
        several = bool(begin[1])
        calls, at = _listed(text, begin.end() - len('{"name"'), several)
        _expect(text, at, "]" if several else "")
        return _whole(text, at + several, Calling(None, calls))
    head, tag, _ = text.partition(_TAG)
    if not tag:
        return None
    calls, at = _tagged(text, len(head))
    return _whole(text, at, Calling(head.strip(_WHITE) or None, calls))


def calls_left_in(text: str) -> Calling | None:
    """The calls of a recorded text; None where it has none, or none that is whole: the text is not
    kept, or has marks in place of personal data."""
    try:
        return calls_in(text)
    except ValueError:
        return None


def _listed(text: str, at: int, several: bool) -> tuple[tuple[ToolCall, ...], int]:
    call, at = _call(text, at)
    calls = [call]
    while several and text.startswith(", ", at):
        call, at = _call(text, at + 2)
        calls.append(call)
    return tuple(calls), at


def _tagged(text: str, at: int) -> tuple[tuple[ToolCall, ...], int]:
    calls: list[ToolCall] = []
    while True:
        at = _expect(text, at, f"{_TAG}\n")
        call, at = _call(text, at)
        calls.append(call)
        at = _expect(text, at, f"\n{_END_TAG}")
        if not text.startswith(f"\n{_TAG}", at):
            return tuple(calls), at
        at += 1


def _call(text: str, at: int) -> tuple[ToolCall, int]:
    name, at = _value(text, _expect(text, at, '{"name": '))
    if not isinstance(name, str):
        raise ValueError("a name that is no text")
    begin = _expect(text, at, ', "arguments": ')
    _, end = _value(text, begin)
    return ToolCall(name, text[begin:end]), _expect(text, end, "}")


def _value(text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _expect(text: str, at: int, part: str) -> int:
    if not text.startswith(part, at):
        raise ValueError(f"no {part!r} at {at}")
    return at + len(part)


def _whole(text: str, at: int, found: Calling) -> Calling:
    if text[at:].strip(_WHITE):
        raise ValueError(f"more text at {at}")
    return found
