"""The table that `specbatch bench` ends with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

Row = dict[str, Any]


def table(rows: Sequence[Row]) -> Table:
    """Tokens/s by way and N, and each over this engine's depth off."""
    counts = sorted({int(row["n"]) for row in rows})
    shown = Table(title="tokens/s (over specbatch's depth off)")
    shown.add_column("engine")
    shown.add_column("mode")
    shown.add_column("acceptance", justify="right")
    for n in counts:
        shown.add_column(f"N={n}", justify="right")
    cells = {(key_of(row), int(row["n"])): row for row in rows}
    last = ""
    for engine, mode, acceptance in dict.fromkeys(key_of(row) for row in rows):
        if last and engine != last:
            shown.add_section()
        share = "" if acceptance is None else f"{acceptance:g}"
        row = [cells.get(((engine, mode, acceptance), n)) for n in counts]
        shown.add_row(engine if engine != last else "", mode, share, *map(_cell, row))
        last = engine
    return shown


def key_of(row: Row) -> tuple[str, str, float | None]:
    """Names a way."""
    return row["engine"], row["mode"], row["acceptance"]


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "failed" in row:
        return "failed"
    return f"{row['tokens_per_sec']:,.0f} ({row['over_off']:.2f}×)"


def remarks(rows: Sequence[Row]) -> list[str]:
    """A sentence per failed way, with the message of its first failure."""
    failed: dict[tuple[str, str], str] = {}
    for row in rows:
        if "failed" in row:
            failed.setdefault((row["engine"], row["mode"]), row["failed"])
    return [f"{engine}, {mode}: {reason}" for (engine, mode), reason in failed.items()]
