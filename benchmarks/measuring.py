"""Times contenders on the same prompts: medians, compared outputs, ratios within the run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from specbatch.benchmarks.contenders import NEW_TOKENS, Contender
from specbatch.jobs.bench.contenders import OURS, Completed, Prompts
from specbatch.jobs.bench.machine import Idling
from specbatch.jobs.bench.peer_client import PeerError

DEFINITION = "generate"  # whose outputs the others' are compared with
Row = dict[str, Any]


def measure(
    contenders: Sequence[Contender],
    model: str,
    prompts: Prompts,
    runs: int,
    idling: Idling | None = None,
) -> list[Row]:
    """One row per contender: a warm-up run, then the median of `runs` runs.

    Contenders take turns, so that a slowdown of the machine affects all of them. A peer that fails
    gets a row with the reason and no more turns.
    """
    n = len(prompts)
    seconds: dict[str, list[float]] = {c.name: [] for c in contenders}
    last: dict[str, Completed] = {}
    failed: dict[str, str] = {}
    idling = idling or Idling(dict)
    for turn in range(runs + 1):
        for contender in contenders:
            name = contender.name
            if name in failed:
                continue
            try:
                with idling.during(name, name):
                    last[name] = contender.complete(prompts)
            except PeerError as error:
                failed[name] = str(error)
                print(f"n={n} {name} failed: {error}", flush=True)
                continue
            rate = n * NEW_TOKENS / last[name].seconds
            what = f"run {turn}" if turn else "warm-up"
            print(f"n={n} {what} {name}: {rate:,.0f} tokens/s", flush=True)
            if turn:
                seconds[name].append(last[name].seconds)
    rows = []
    for contender in contenders:
        name = contender.name
        row: Row = {"model": model, "n": n, "contender": name, "engine": contender.engine}
        if name in failed:
            row["failed"] = failed[name]
        else:
            row["tokens_per_sec"] = round(n * NEW_TOKENS / statistics.median(seconds[name]), 1)
            row["seconds"] = [round(s, 4) for s in seconds[name]]
            if DEFINITION in last:
                row["same_as_generate"] = same(last[name], last[DEFINITION])
            row["others_cores"] = idling.cores(name)
            row |= last[name].facts
        rows.append(row)
    return with_ratios(rows)


def same(one: Completed, other: Completed) -> float:
    """The share of prompts that both completed alike."""
    pairs = zip(one.outputs, other.outputs, strict=True)
    return round(sum(a == b for a, b in pairs) / len(one.outputs), 4)


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Rows of one N. Ours also have their rate over the best of every other engine."""
    best: dict[str, float] = {}
    for row in rows:
        if row["engine"] != OURS and "tokens_per_sec" in row:
            best[row["engine"]] = max(best.get(row["engine"], 0.0), row["tokens_per_sec"])
    return [
        row | {f"vs_best_{e}": round(row["tokens_per_sec"] / rate, 3) for e, rate in best.items()}
        if row["engine"] == OURS
        else row
        for row in rows
    ]
