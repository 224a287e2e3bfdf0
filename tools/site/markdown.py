"""Markdown as the made pages write it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_CODED = re.compile(r"(`[^`]*`)")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; pipes and line ends in cells are escaped."""
    lines = [_line(columns), _line(["---"] * len(columns))]
    return "\n".join(lines + [_line(row) for row in rows]) + "\n"


def code(value: object) -> str:
    """`value` in code type."""
    text = str(value)
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def plain(text: str) -> str:
    """Prose from the code on one line: angle brackets are text, code type is kept."""
    parts = _CODED.split(" ".join(text.split()))
    return "".join(p if p.startswith("`") else _escaped(p) for p in parts)


def page(title: str, intro: str, *sections: str) -> str:
    """A whole page."""
    return "\n".join([f"# {title}", "", intro.strip(), "", *sections])


def section(title: str, *parts: str, level: int = 2, anchor: str = "") -> str:
    """A heading and the parts under it."""
    mark = f" {{ #{anchor} }}" if anchor else ""
    return "\n".join([f"{'#' * level} {title}{mark}", "", *(f"{p}\n" for p in parts if p)])


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("*", "&#42;").replace("_", "\\_")


def _line(cells: Sequence[str]) -> str:
    flat = (" ".join(cell.split()).replace("|", "&#124;") for cell in cells)
    return f"| {' | '.join(flat)} |"
