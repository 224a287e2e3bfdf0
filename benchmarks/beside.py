"""`auto` beside the best of the other modes, from their speeds in several runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def beside_others(runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Tokens per second by mode, "off" and "auto" among them: medians of ratios within a run, so
    that the machine's mood cancels out."""
    ratios = {
        name: statistics.median(run[name] / run["off"] for run in runs)
        for name in runs[0]
        if name != "off"
    }
    others = {"off": 1.0} | {name: r for name, r in ratios.items() if name != "auto"}
    best = max(others, key=lambda name: others[name])
    return {
        "over_off": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "best": best,
        "auto_over_best": round(ratios["auto"] / others[best], 3),
        "auto_over_best_by_run": [round(run["auto"] / run[best], 3) for run in runs],
        "auto_over_best_chosen_apart": round(statistics.median(beside_best(runs)), 3),
    }


def beside_best(runs: Sequence[Mapping[str, float]]) -> list[float]:
    """By run: `auto` over the mode that was the fastest, beside "off", in all the other runs.

    The fastest of several alike was lucky in the runs that chose it, and looks faster than it is.
    In a run that had no say it is itself.
    """
    names = [name for name in runs[0] if name != "auto"]
    ratios = []
    for i, run in enumerate(runs):
        elsewhere = [other for j, other in enumerate(runs) if j != i] or [run]
        gains = {name: statistics.median(o[name] / o["off"] for o in elsewhere) for name in names}
        best = max(gains, key=lambda name: gains[name])
        ratios.append(run["auto"] / run[best])
    return ratios
