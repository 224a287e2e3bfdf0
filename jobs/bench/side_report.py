"""The table and the plot of `specbatch bench`.

The plot shows speed against the number of prompts and against acceptance. For other engines'
entries with drafts it shows the best one at each point; the JSON has them all. matplotlib is an
extra, so it is imported only when a plot is made.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from specbatch.jobs.bench.contenders import DRAFT_MODEL, OURS
from specbatch.jobs.bench.entries import AUTO, NONE, OFF, REPLAYED

Row = dict[str, Any]


def table(rows: Sequence[Row]) -> Table:
    """Tokens/s by entry and N, and each over this engine's depth off."""
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
    """Names an entry."""
    return row["engine"], row["mode"], row["acceptance"]


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "failed" in row:
        return "failed"
    return f"{row['tokens_per_sec']:,.0f} ({row['over_off']:.2f}×)"


def remarks(rows: Sequence[Row]) -> list[str]:
    """A sentence per failed entry, with the message of its first failure."""
    failed: dict[tuple[str, str], str] = {}
    for row in rows:
        if "failed" in row:
            failed.setdefault((row["engine"], row["mode"]), row["failed"])
    return [f"{engine}, {mode}: {reason}" for (engine, mode), reason in failed.items()]


# Okabe and Ito's colours, which the colour-blind tell apart: one family per engine.
COLOURS = {
    OURS: "#0072b2",
    "transformers": "#d55e00",
    "openvino": "#009e73",
    "vllm": "#e69f00",
    "llama.cpp": "#cc79a7",
}
LINES = ((0, ()), (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)), (0, (2, 1)), (0, (7, 2, 1, 2)))
Lines = dict[str, list[Row]]
MARKS = "osD^vXP*"
BEST = "best with drafts"
HINT = "no plot: `pip install 'specbatch[bench]'` brings matplotlib, which draws it"


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw a report into an SVG file; the same report gives the same bytes."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    rows = [row for row in report["rows"] if "tokens_per_sec" in row]
    settings = {"svg.hashsalt": "specbatch", "svg.fonttype": "path", "font.size": 9}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(11, 6.5), layout="constrained")
        FigureCanvasSVG(figure)
        by_count, by_share = figure.subplots(1, 2)
        lines = _lines(rows)
        styles = _styles(lines)
        _against_count(by_count, lines, styles)
        _against_acceptance(by_share, lines, styles)
        drawn: dict[str, Any] = {}
        for axes in (by_count, by_share):
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                drawn.setdefault(label, handle)
        labels = sorted(drawn, key=list(styles).index)
        figure.legend(
            [drawn[label] for label in labels], labels, loc="outside lower center", ncols=3
        )
        figure.suptitle(_title(report))
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def reference_share(rows: Sequence[Row]) -> float | None:
    """The acceptance of the left panel: the highest replayed one below 1, if any."""
    shares = sorted({row["acceptance"] for row in rows if row["drafts"] == REPLAYED})
    return next((share for share in reversed(shares) if share < 1), shares[0] if shares else None)


def reference_count(rows: Sequence[Row]) -> int:
    """The N of the right panel: 8, or the nearest one."""
    return min({int(row["n"]) for row in rows}, key=lambda n: (abs(n - 8), n))


def _lines(rows: Sequence[Row]) -> Lines:
    """The rows of each line, by its label."""
    lines: Lines = {}
    best: dict[tuple[str, int, float | None], Row] = {}
    for row in rows:
        if row["engine"] == OURS or row["drafts"] == NONE:
            lines.setdefault(f"{row['engine']}: {row['mode']}", []).append(row)
            continue
        at = row["engine"], int(row["n"]), row["acceptance"]
        if at not in best or row["tokens_per_sec"] > best[at]["tokens_per_sec"]:
            best[at] = row
    for (engine, _, _), row in best.items():
        lines.setdefault(f"{engine}: {BEST}", []).append(row)
    return dict(sorted(lines.items(), key=lambda line: list(COLOURS).index(line[1][0]["engine"])))


def _styles(lines: Lines) -> dict[str, dict[str, Any]]:
    """One colour per engine, one dash and mark per entry; off and auto are drawn thicker."""
    styles: dict[str, dict[str, Any]] = {}
    used: dict[str, int] = {}
    for label, rows in lines.items():
        engine, mode = rows[0]["engine"], rows[0]["mode"]
        i = used[engine] = used.get(engine, -1) + 1
        styles[label] = {
            "color": COLOURS[engine],
            "linestyle": LINES[i % len(LINES)],
            "marker": MARKS[i % len(MARKS)],
            "markersize": 5,
            "markerfacecolor": COLOURS[engine] if rows[0]["drafts"] == NONE else "white",
            "linewidth": 2.4 if engine == OURS and mode in (OFF, AUTO) else 1.3,
            "label": label,
        }
    return styles


def _against_count(axes: Any, lines: Lines, styles: dict[str, dict[str, Any]]) -> None:
    from matplotlib.ticker import NullFormatter, NullLocator, ScalarFormatter

    rows = [row for line in lines.values() for row in line]
    share = reference_share(rows)
    for label, line in lines.items():
        points: dict[int, float] = {}
        for row in line:
            real = row["engine"] == OURS and row["drafts"] == DRAFT_MODEL
            if row["acceptance"] in (None, share) and not (real and share is not None):
                n, rate = int(row["n"]), row["tokens_per_sec"]
                points[n] = max(rate, points.get(n, rate))
        if points:
            axes.plot(*zip(*sorted(points.items()), strict=True), **styles[label])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    counts = sorted({int(row["n"]) for row in rows})
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("N (prompts at once)")
    axes.set_ylabel("throughput (tokens/s)")
    drafts = "" if share is None else f", replayed drafts of acceptance {share:g}"
    axes.set_title(f"Throughput{drafts}")
    axes.grid(True, which="major", alpha=0.3)


def _against_acceptance(axes: Any, lines: Lines, styles: dict[str, dict[str, Any]]) -> None:
    n = reference_count([row for line in lines.values() for row in line])
    for label, line in lines.items():
        points = []
        for row in line:
            if row["n"] != n:
                continue
            if row["drafts"] == NONE:
                axes.axhline(row["over_off"], **styles[label] | {"marker": "", "alpha": 0.7})
            elif row["drafts"] == REPLAYED:
                points.append((row["acceptance"], row["over_off"]))
            elif row["engine"] == OURS and row.get("proposed"):  # at what its draft model reached
                points.append((row["accepted"] / row["proposed"], row["over_off"]))
        if points:
            axes.plot(*zip(*sorted(points), strict=True), **styles[label])
    axes.set_xlim(-0.03, 1.03)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("acceptance (probability that a draft token is right)")
    axes.set_ylabel("speed over specbatch's depth off (×)")
    axes.set_title(f"What drafts bring at N = {n}")
    axes.grid(True, alpha=0.3)


def _title(report: dict[str, Any]) -> str:
    machine, prompts = report["machine"], report["prompts"]
    return (
        f"{report['model']}, {report['dtype']}, {report['new_tokens']} new tokens a prompt "
        f"({prompts['source']} prompts), {machine['threads']} threads of {machine['cpu']}, "
        f"{machine['date']}"
    )
