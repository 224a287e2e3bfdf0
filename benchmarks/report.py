"""The file of results: written after each N, and merged with earlier results of this setup."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specbatch.benchmarks.contenders import DEPTH_0
from specbatch.benchmarks.measuring import Row
from specbatch.pipeline.observe.terminal.plain_console import PlainConsole

Header = dict[str, Any]


class Results:
    """Rows under a header: the machine, its versions and the date, the peers and theirs.

    A file with an equal header keeps its rows of other N. Any other file is replaced, since ratios
    hold within one setup only.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.header = header
        self.rows = _rows_under(path, header)

    def add(self, rows: Sequence[Row]) -> None:
        """Replace all rows of the same N with these, and write the file."""
        measured = {row["n"] for row in rows}
        kept = [row for row in self.rows if row["n"] not in measured]
        self.rows = sorted([*kept, *rows], key=lambda row: int(row["n"]))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".tmp")
        unfinished.write_text(json.dumps({**self.header, "rows": self.rows}, indent=1) + "\n")
        unfinished.replace(self.path)


def _rows_under(path: Path, header: Header) -> list[Row]:
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    rows: list[Row] = found.pop("rows")
    return rows if found == header else []


UNSURE = "* may have used instructions above the level"


def print_table(rows: Sequence[Row], console: Console | None = None) -> None:
    """Tokens/s by contender and N, and this engine's depth 0 over each. A star marks what was not
    verified to have kept to the level that all were held to."""
    cells = {(row["contender"], row["n"]): row for row in rows}
    counts = sorted({row["n"] for row in rows})
    table = Table(title="tokens/s (depth 0 over it)")
    table.add_column("contender")
    for n in counts:
        table.add_column(f"N={n}", justify="right")
    for name in dict.fromkeys(row["contender"] for row in rows):
        table.add_row(name, *(_cell(cells.get((name, n)), cells.get((DEPTH_0, n))) for n in counts))
    console = console or PlainConsole()
    console.print(table)
    if any(map(_is_unsure, rows)):
        console.print(UNSURE)


def _cell(row: Row | None, ours: Row | None) -> str:
    if row is None:
        return ""
    rate = row.get("tokens_per_sec")
    if rate is None:
        return "failed"
    ratio = f" ({ours['tokens_per_sec'] / rate:.2f}×)" if ours else ""
    return f"{rate:,.0f}{'*' if _is_unsure(row) else ''}{ratio}"


def _is_unsure(row: Row) -> bool:
    return row.get("isa_verified") is False
