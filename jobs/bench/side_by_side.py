"""`specbatch bench`: throughput against the number of prompts and against acceptance, by engine.

All entries of all engines complete the same prompts in turns within one run: once to warm up and to
learn, then `runs` times. Depth off is timed before each source of our drafts and before each other
engine. A ratio is the median, over the turns, of ratios to the depth off that ran last, so that the
machine's mood cancels out. The first of a process's turns after another's is not counted: libraries
leave threads spinning and caches cold. The file is written after each N, and holds what was
finished at an interruption.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from specbatch.jobs.bench.contenders import OURS, Completed, Ours, Prompts, looked_at
from specbatch.jobs.bench.entries import (
    AUTO,
    HOW,
    LOOKUP,
    NONE,
    OFF,
    ONE_BY_ONE,
    Entry,
    described,
    our_entries,
    same,
    transformers_entries,
)
from specbatch.jobs.bench.huggingface import ENGINE, Transformers
from specbatch.jobs.bench.isa import forced_level
from specbatch.jobs.bench.machine import Idling, machine
from specbatch.jobs.bench.models import BenchModel
from specbatch.jobs.bench.peer_client import PeerError
from specbatch.jobs.bench.peer_entries import HOW as PEERS_HOW
from specbatch.jobs.bench.peer_entries import PeerEntries
from specbatch.jobs.bench.plan import OURS_KEY, Plan, PromptSet, read_prompts

ISA_FACTS = ("isa", "isa_verified", "isa_by")
Row = dict[str, Any]
Key = tuple[str, str, float | None]
DEPTH_OFF: Key = (OURS, OFF, None)
OnProgress = Callable[[int, int, str], None]  # runs done, runs in all, what is done now


@dataclass(slots=True)
class Turns:
    """The runs of all entries at one N so far."""

    n: int
    rates: dict[Key, list[float]] = field(default_factory=dict)  # tokens/s, without the warm-up
    ratios: dict[Key, list[float]] = field(default_factory=dict)  # over depth off's last rate
    last: dict[Key, Completed] = field(default_factory=dict)
    failed: dict[Key, str] = field(default_factory=dict)
    idling: Idling = field(default_factory=lambda: Idling(dict))

    def rows(self, entries: Sequence[Entry]) -> list[Row]:
        """One row per entry that was measured, or that failed."""
        rows = []
        for entry in {entry.key: entry for entry in entries}.values():
            row: Row = {
                "n": self.n,
                "engine": entry.engine,
                "mode": entry.mode,
                "drafts": entry.drafts,
                "acceptance": entry.acceptance,
            }
            rates = self.rates.get(entry.key, [])
            if reason := self.failed.get(entry.key):
                row["failed"] = reason
            elif not rates:
                continue
            else:
                completed = self.last[entry.key]
                facts = dict(completed.facts)
                row["tokens_per_sec"] = round(statistics.median(rates), 1)
                row["over_off"] = round(statistics.median(self.ratios[entry.key]), 3)
                row["runs_tokens_per_sec"] = [round(rate, 1) for rate in rates]
                row["timed_prompts"] = len(completed.outputs)
                row["same_as_off"] = same(completed.outputs, self.last[DEPTH_OFF].outputs)
                row |= {
                    key: facts[key]
                    for key in ("proposed", "accepted", "as_replayed", *ISA_FACTS)
                    if key in facts
                }
                row["others_cores"] = self.idling.cores(str(entry.key))
                if "accepted" in facts:
                    tokens = sum(map(len, completed.outputs))
                    row["tokens_per_pass"] = round(tokens / (tokens - facts["accepted"]), 3)
            rows.append(row)
        return rows


@dataclass(slots=True)
class Report:
    """The contents of the results file."""

    header: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    interrupted: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            **self.header,
            "interrupted": self.interrupted,
            "rows": self.rows,
            "auto_beside_others": beside_others(self.rows),
        }

    def write(self, path: Path) -> None:
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self.as_json(), indent=1) + "\n")
        unfinished.replace(path)


def run(plan: Plan, path: Path, work: Path, on_progress: OnProgress) -> Report:
    """Measure, writing the file after each N. Interrupted, it returns what there is."""
    model, draft = plan.bench_model(work)
    prompts = read_prompts(plan, model.folder)
    on_progress(0, 1, "loading")
    with _taking_part(plan, model, draft, work) as (entries, peers):
        header = _header(plan, model.name, draft, prompts)
        header["engines"] = described(entries, HOW | PEERS_HOW)
        header["versions"] = peers.versions
        report = Report(header)
        total = len(plan.counts) * (plan.runs + 1) * len(entries)
        for i, n in enumerate(plan.counts):
            turns = Turns(n, idling=Idling(peers.processes))
            first = i * total // len(plan.counts)
            try:
                _take_turns(turns, entries, prompts.ids[:n], plan, (first, total), on_progress)
            except KeyboardInterrupt:
                report.interrupted = True
            report.rows += turns.rows(entries)
            if report.rows:
                report.write(path)
            if report.interrupted:
                break
    return report


@contextmanager
def _taking_part(
    plan: Plan, model: BenchModel, draft: Path | None, work: Path
) -> Iterator[tuple[list[Entry], PeerEntries]]:
    """All entries in their order; ours come first, since the others replay what depth off wrote."""
    isa = None if plan.engines == (OURS_KEY,) else forced_level(os.environ)
    ours = Ours(model, plan.dtype, new_tokens=plan.new_tokens, draft=draft)
    entries = our_entries(plan, ours)
    if ENGINE in plan.engines:
        dtype: torch.dtype = getattr(torch, plan.dtype)
        theirs = Transformers(model.folder, dtype, new_tokens=plan.new_tokens, draft=draft)
        entries += transformers_entries(plan, ours, theirs)
    if plan.engines != (OURS_KEY,):
        entries = [replace(entry, complete=looked_at(entry.complete, isa)) for entry in entries]
    with PeerEntries(plan, os.environ, model, draft, ours, work, isa) as peers:
        yield list(_off_before_others([*entries, *peers.entries])), peers


def _off_before_others(entries: Sequence[Entry]) -> Iterator[Entry]:
    """Ours has depth off among its own, and that is first."""
    for engine, of_engine in groupby(entries, attrgetter("engine")):
        if engine != OURS:
            yield entries[0]
        yield from of_engine


def _take_turns(
    turns: Turns,
    entries: Sequence[Entry],
    prompts: Prompts,
    plan: Plan,
    steps: tuple[int, int],
    on_progress: OnProgress,
) -> None:
    done, total = steps
    off_rate = 1.0
    for turn in range(plan.runs + 1):
        before: tuple[str, str] | None = None  # engine and process of the last entry
        for entry in entries:
            on_progress(done, total, f"N={turns.n} {entry.engine} {entry.label}")
            done += 1
            if entry.key in turns.failed:
                continue
            part = prompts[:ONE_BY_ONE] if entry.one_by_one else prompts
            try:
                if (entry.engine, entry.process) != before:
                    entry.complete(part)
                with turns.idling.during(entry.process, str(entry.key)):
                    completed = entry.complete(part)
            except PeerError as error:
                turns.failed[entry.key] = str(error)
                continue
            before = entry.engine, entry.process
            turns.last[entry.key] = completed
            rate = len(part) * plan.new_tokens / completed.seconds
            if entry.key == DEPTH_OFF:
                off_rate = rate
            if turn:
                turns.rates.setdefault(entry.key, []).append(rate)
                turns.ratios.setdefault(entry.key, []).append(rate / off_rate)
    on_progress(done, total, f"N={turns.n} done")


def _header(plan: Plan, model: str, draft: Path | None, prompts: PromptSet) -> dict[str, Any]:
    return {
        "machine": machine() | {"specbatch": importlib.metadata.version("specbatch")},
        "model": model,
        "proposer": draft.name if draft else None,
        "dtype": plan.dtype,
        "prompts": prompts.facts,
        "new_tokens": plan.new_tokens,
        "runs": plan.runs,
    }


def beside_others(rows: Sequence[Row]) -> list[Row]:
    """Auto's rate over the best of the other engines' entries: with the same drafts, and of all.

    The same drafts are replayed ones of its acceptance, or the draft model's. All entries are
    these, those that do not draft, and prompt lookup, whose acceptance is what the texts make it.
    """
    found = []
    rated = [row for row in rows if "tokens_per_sec" in row]
    for auto in rated:
        if auto["engine"] != OURS or not auto["mode"].endswith(AUTO):
            continue
        drafts = auto["drafts"], auto["acceptance"]
        others = [r for r in rated if r["n"] == auto["n"] and r["engine"] != OURS]
        alike = [r for r in others if (r["drafts"], r["acceptance"]) == drafts]
        free = [r for r in others if r["drafts"] in (NONE, LOOKUP)]
        row = {key: auto[key] for key in ("n", "drafts", "acceptance", "tokens_per_sec")}
        for name, rivals in (("same_drafts", alike), ("other", [*alike, *free])):
            if rivals:
                best = max(rivals, key=lambda r: float(r["tokens_per_sec"]))
                ratio = auto["tokens_per_sec"] / best["tokens_per_sec"]
                row[f"best_{name}"] = f"{best['engine']} {best['mode']}"
                row[f"over_best_{name}"] = round(ratio, 3)
        found.append(row)
    return found
