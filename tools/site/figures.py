"""The page of measurements: every figure is read from a benchmark's result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from specbatch import benchmarks
from specbatch.tools.site.markdown import page, section, table
from specbatch.tools.site.plots import Panel, charts

RESULTS = Path(benchmarks.__file__).parent / "results"

_INTRO = """
Every figure here is read from a JSON file in `benchmarks/results` when these pages are built.
They come from small machines without a GPU, so compare ratios within a run, not absolute speeds.
`benchmarks/NOTES.md` records what was tried and did not pay off.
"""


def figures_page() -> str:
    """All figures."""
    return page(
        "Figures",
        _INTRO,
        _depth("depth-demo-bfloat16", "The depth that pays: demo pair", "demo"),
        _depth("depth-llama-230m-bfloat16", "The depth that pays: 230M model", "llama-230m"),
        _beside(),
        _scale(),
        _overhead(),
        _ledger(),
        _acceptance(),
        _exactness(),
        _memory(),
    )


def result(name: str) -> Any:
    """One result."""
    return orjson.loads((RESULTS / f"{name}.json").read_bytes())


def depth_charts(name: str) -> str:
    """Tokens per second over depth 0 by acceptance, for a few numbers of sequences."""
    rows = result(name)["rows"]
    panels = []
    for count in few(sorted({row["n"] for row in rows})):
        # Drafts that are never wrong have no place in practice, and would stretch the scale.
        of = sorted(
            (r for r in rows if r["n"] == count and r["acceptance"] < 1),
            key=lambda r: r["acceptance"],
        )
        series = {
            "auto": [(r["acceptance"], r["over_off"]["auto"]) for r in of],
            **{
                f"depth {depth}": [(r["acceptance"], r["over_off"][depth]) for r in of]
                for depth in ("2", "4", "8")
            },
        }
        panels.append(Panel(f"{count} sequence{'s' if count > 1 else ''}", series, level=1.0))
    return charts(
        panels,
        "acceptance of a draft token",
        "times depth 0",
        "Tokens per second beside depth 0 in the same run. Drafts are replayed from the known "
        "output, each token right with the given probability. Where the dashed line is not "
        "reached, drafting does not pay.",
    )  # fmt: skip


def few(counts: Sequence[int]) -> Sequence[int]:
    """Up to three of the numbers of sequences that were measured."""
    usual = [count for count in (1, 8, 32) if count in counts]
    if len(usual) == 3 or len(counts) < 4:
        return usual or counts
    return [counts[0], counts[len(counts) // 2], counts[-1]]


def _depth(name: str, title: str, model: str) -> str:
    data = result(name)
    worst = min(row["auto_over_best"] for row in data["rows"])
    cases = len(data["rows"])
    said = (
        f"`auto` beside the best of all fixed depths, over {cases} cases of number of sequences "
        f"and acceptance: at least {worst:.2f} of it."
    )
    return section(title, said, depth_charts(name), _made(data, f"make bench-depth ({model})"))


def _beside() -> str:
    data = result("bench-llama-230m")
    rows = [
        (
            f"{row['n']}",
            str(row["drafts"]),
            _share(row["acceptance"]),
            f"{row['tokens_per_sec']:,.0f}",
            str(row["best_other"]),
            f"{row['over_best_other']:.2f}",
        )
        for row in data["auto_beside_others"]
    ]
    columns = ("prompts", "drafts", "acceptance", "tokens/s", "best other way", "times it")
    return section(
        "Beside other engines: 230M model",
        table(columns, rows),
        _made(data, bench_command(data)),
    )


def bench_command(data: Mapping[str, Any]) -> str:
    """The command of a result of `specbatch bench`, by what the file says of its run."""
    rows = data["rows"]
    shares = sorted({row["acceptance"] for row in rows} - {None})
    flags = {
        "model": data["model"],
        "n": ",".join(str(n) for n in sorted({row["n"] for row in rows})),
        "acceptance": ",".join(f"{share:g}" for share in shares) or "none",
        "engines": ",".join(data["engines"]).replace("specbatch", "ours"),
        "new-tokens": data["new_tokens"],
        "runs": data["runs"],
        "dtype": data["dtype"],
        "threads": data["machine"]["threads"],
    }
    real = " --real" if data["proposer"] else ""
    return f"specbatch bench {' '.join(f'--{name} {said}' for name, said in flags.items())}{real}"


def _scale() -> str:
    data = result("scale")
    rows = [
        (
            f"{row['verifiers']}",
            f"{row['groups_per_sec']:.2f}",
            f"{row['times_one']:.1f}",
            f"{row['cpu']:.0%}",
        )
        for row in data["workers"]
    ]
    return section(
        "More verifiers",
        "Verifier processes that wait instead of computing, on one store and one broker: what "
        "everything but the model allows.",
        table(("verifiers", "groups/s", "times one", "of the cores"), rows),
        _made(data, "make bench-scale"),
    )


def _overhead() -> str:
    data = result("overhead-demo")
    rows = [
        (
            str(row["processes"]),
            str(row["depth"]),
            f"{row['n']:,}",
            f"{row['overhead']:.0%}",
            ", ".join(f"{share:.0%}" for share in row["overheads"]),
        )
        for row in data["rows"]
    ]
    return section(
        "The whole path beside the engine alone",
        "A job from input to published output, beside the engine that gets the same prompts at "
        "once. Here the engine fills all cores by itself, so whatever else is done costs time: "
        "the worst case.",
        table(("processes", "depth", "prompts", "longer by", "by turn"), rows),
        _made(data, "make bench-overhead"),
    )


def _ledger() -> str:
    data = result("ledger")
    rows = [
        (
            name,
            f"{row['mean_tokens']}",
            "yes" if row["drafts"] else "no",
            f"{row['bytes_per_token']:.1f}",
            f"{row['commit_tokens_per_sec']:,}",
        )
        for name, key in (("PostgreSQL", "postgres"), ("SQLite", "sqlite"))
        for row in data[key]
        if row["clients"] == 1
    ]
    columns = ("store", "tokens per completion", "drafts", "bytes per token", "tokens/s committed")
    return section(
        "What a token's record takes",
        "With indexes: whose the token was, when it was decided, its share of the time, its "
        "log-probability.",
        table(columns, rows),
        _made(data, "make bench-ledger"),
    )


def _acceptance() -> str:
    data = result("acceptance-demo")
    rows = [
        (
            name,
            f"{row['accepted_of_proposed']:.0%}",
            f"{row['tokens_per_pass']:.2f}",
            f"{row['tokens_per_sec']:,.0f}",
        )
        for name, row in data["depth_4"].items()
    ]
    return section(
        "Ways of verification, sampled",
        "The demo pair at temperature 1 and depth 4. The ratio tests keep more drafts and cost "
        "more here.",
        table(("verification", "drafts kept", "tokens per pass", "tokens/s"), rows),
        _made(data, "make bench-acceptance"),
    )


def _exactness() -> str:
    data = result("exactness-torch-path")
    rows = [
        (
            str(row["model"]),
            str(row["dtype"]),
            *(f"{cost['bitwise_over_fast_time']:.2f}" for cost in row["cost"]),
        )
        for row in data["rows"]
    ]
    counts = [f"{cost['n']} sequences" for cost in data["rows"][0]["cost"]]
    return section(
        "What bitwise costs on the torch path",
        "Time with `exactness: bitwise` over time with `fast`. The native path has no such price.",
        table(("model", "dtype", *counts), rows),
        _made(data, "make bench-exactness"),
    )


def _memory() -> str:
    data = result("memory")
    rows = [
        (
            str(row["model"]),
            str(row["dtype"]),
            f"{row['announced']['total'] / 2**20:,.0f}",
            f"{row['peak'] / 2**20:,.0f}",
            f"{row['peak_to_announced']:.1%}",
        )
        for row in data["rows"]
    ]
    return section(
        "Memory, announced and taken",
        table(("model", "dtype", "announced, MiB", "taken, MiB", "share"), rows),
        _made(data, "make bench-memory"),
    )


def _made(data: Mapping[str, Any], command: str) -> str:
    noted = f" Note: {data['note']}." if data.get("note") else ""
    return f"<small>{machines(data)}; made by `{command}`.{noted}</small>"


def machines(data: Mapping[str, Any]) -> str:
    """What a result was measured on, and when; which numbers of sequences, where machines differ.

    Rows that are kept from an earlier run on another machine carry their own.
    """
    own = [row for row in data.get("rows", ()) if "machine" in row]
    if not own:
        return _machine(data["machine"])
    counts: dict[str, set[int]] = {}
    for row in data["rows"]:
        counts.setdefault(_machine(row.get("machine", data["machine"])), set()).add(row["n"])
    by_least = sorted(counts.items(), key=lambda item: sorted(item[1]))
    return "; ".join(
        f"at {', '.join(map(str, sorted(of)))} sequences: {name}" for name, of in by_least
    )


def _machine(facts: Mapping[str, Any]) -> str:
    cores = facts.get("threads") or facts.get("cores")
    return f"{facts['date']}, {cores} threads of {facts['cpu']}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
