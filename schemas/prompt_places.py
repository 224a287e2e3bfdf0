"""The simple language of prompt templates: text with `{column}` places.

`{{` and `}}` are literal braces. A place holds the name of a column and nothing else, so a template
can neither compute nor fail with a row that has the columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_SIGNS = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_DOUBLED = re.compile(r"\{\{([^{}]*)\}\}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a column's value goes."""

    column: str


def parts_of(template: str) -> tuple[str | Place, ...]:
    """The template as literal texts and places. Raises `ValueError` with a clause that names the
    line."""
    parts: list[str | Place] = []
    at = 0
    for found in _SIGNS.finditer(template):
        parts.append(template[at : found.start()])
        at = found.end()
        sign, column = found[0], found[1]
        if column is None and len(sign) == 1:
            raise ValueError(f"{_line(template, found.start())} has a single {sign}: {_BRACES}")
        parts.append(sign[0] if column is None else _place(template, found.start(), column))
    parts.append(template[at:])
    return tuple(part for part in parts if part != "")


def columns_in(template: str) -> list[str]:
    """The columns that the template names, each once, in its order. Raises as `parts_of` does."""
    parts = parts_of(template)
    return list(dict.fromkeys(part.column for part in parts if isinstance(part, Place)))


def first_doubled(template: str) -> str | None:
    """The text in the first pair of double braces: perhaps a column, meant as Jinja writes it."""
    found = _DOUBLED.search(template)
    return found[1].strip() if found else None


def in_brief(spec: Mapping[str, Any], kept: Callable[[str], str] = str) -> list[tuple[str, str]]:
    """The template and the system prompt of a stored spec, each with its name and on one line.

    `kept` gives the part of a text that may be shown.
    """
    asked = spec.get("input") or {}
    texts = ((name, asked.get(name)) for name in ("template", "system"))
    return [(name, _on_a_line(kept(text))) for name, text in texts if text]


def _on_a_line(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _BRIEF else words[: _BRIEF - 1] + "…"


_BRIEF = 160  # characters
_BRACES = "a place is {column}, and a literal brace is written {{ or }}"


def _place(template: str, offset: int, column: str) -> Place:
    if not column.strip():
        raise ValueError(f"{_line(template, offset)} has {{}} without a column's name: {_BRACES}")
    if column.startswith("%") and column.endswith("%"):
        raise ValueError(
            f"{_line(template, offset)} has {{{column}}}: for Jinja set template_kind to jinja"
        )
    return Place(column)


def _line(template: str, offset: int) -> str:
    return f"line {template.count(chr(10), 0, offset) + 1}"
