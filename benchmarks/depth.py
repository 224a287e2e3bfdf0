"""`make bench-depth`: what `auto` makes of drafts, beside depth 0 and every fixed depth.

For each number of prompts and each acceptance: tokens per second of depth off, auto and fixed, all
at work at once, in short turns. Drafts are replayed from the known output, each
token right with the wanted probability; `--real` drafts with the demo's own draft model instead,
`--history` from the outputs of the run before. What was learned of a machine and of a source of
drafts is kept from run to run; the first run of each is not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from specbatch.benchmarks.contenders import random_prompts
from specbatch.benchmarks.engine import RESULTS
from specbatch.benchmarks.pass_prices import Spent, TimedRunner, common_prices, priced_sec
from specbatch.jobs.bench.contenders import ReplayProposer
from specbatch.jobs.bench.machine import machine
from specbatch.jobs.bench.models import BenchModel, demo_model, random_model
from specbatch.pipeline.engines.contract import Cohort, EngineStats, Request
from specbatch.pipeline.engines.exact.draft_model import DraftModelProposer
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.exact.model.runner import ModelRunner
from specbatch.pipeline.engines.models.draft_names import DRAFT_MODEL
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.engines.proposers.history import HistoryProposer
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.ledger import rules
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.schemas.records import SamplingParams
from specbatch.schemas.speculation import AcceptanceCount

ACCEPTANCES = (0.0, 0.3, 0.5, 0.7, 0.9, 1.0)  # 1: the true output
FIXED = (2, 4, 8)
HISTORY = "history"  # the past output of the same prompt
Source = float | str  # an acceptance, or the name of a proposer
Mode = tuple[str, int | None]
MODES: tuple[Mode, ...] = (("auto", None), *((str(k), k) for k in FIXED))
OFF: Mode = ("off", 0)
TURN_SEC = 0.1  # the first steps of each meet caches that are full of another mode's sequences
KV_CACHE_BYTES = 2 << 30  # for all modes at once


@dataclass(slots=True)
class Entrant:
    """A mode's engine, the set of requests it is given again and again, and what it has taken."""

    engine: Engine
    runner: TimedRunner
    requests: Seq[Request]
    seconds: float = 0.0
    spent: Spent = field(default_factory=Spent)
    sets: int = 0
    done: dict[str, list[int]] = field(default_factory=dict)  # of the last set

    def go(self, at_least_sec: float) -> None:
        """Some steps, but not beyond the end of a set."""
        if self.engine.idle:
            self.done.clear()
            self.sets += 1
            for request in self.requests:
                self.engine.add(request)
        until = self.seconds + at_least_sec
        while self.seconds < until and not self.engine.idle:
            begun = time.perf_counter()
            completions = self.engine.step()
            seconds = time.perf_counter() - begun
            self.seconds += seconds
            self.spent.add(seconds, self.runner.take_passes())
            self.done.update({c.request_id: list(c.token_ids) for c in completions})


@dataclass(frozen=True, slots=True)
class Race:
    """Tokens per second of every mode, and the counts of `auto`."""

    speeds: dict[str, float]
    level: dict[str, float]  # where passes of a size cost all modes the same
    luck: dict[str, float]  # seconds of a mode's passes, over what they cost all modes
    stats: EngineStats


class Bed:
    """One verifier, and drafts for it of any acceptance.

    What is learned is kept from run to run as the store keeps it: step times for the machine and
    its models, acceptance for each job name, which here is the source of the drafts.
    """

    def __init__(self, model: BenchModel, dtype: str, new_tokens: int) -> None:
        self.vocab_size, self.new_tokens = model.vocab_size, new_tokens
        self.runner = self._load(model.folder, dtype)
        self._drafting: ModelRunner | None = None
        self._folder, self._dtype = model.folder, dtype
        self.learned = Knowledge()
        self.priors: dict[Source, tuple[AcceptanceCount, ...]] = {}
        self.known: dict[str, list[int]] = {}

    @staticmethod
    def _load(folder: Path, dtype: str) -> TimedRunner:
        loaded = load_model(inspect_model(str(folder)), dtype)
        return TimedRunner(loaded, kv_cache_bytes=KV_CACHE_BYTES, share_prefixes=False)

    def proposer(self, source: Source) -> Proposer:
        if source == DRAFT_MODEL:
            if self._drafting is None:
                self._drafting = self._load(self._folder.parent / "draft", self._dtype)
            cost = self.learned.draft_time_of(DRAFT_MODEL)
            return DraftModelProposer(self._drafting, pass_time=cost)
        if source == HISTORY:
            return HistoryProposer(self.vocab_size)
        return ReplayProposer(self.known, float(source), self.vocab_size)

    def look_up(self, prompts: list[list[int]], at_once: int) -> None:
        """The outputs, of depth 0: what drafts are made of, and what every mode must write."""
        entrant = self.entrant(prompts, at_once, 0, 0.0, Knowledge())
        entrant.go(math.inf)
        self.known |= entrant.done

    def race(
        self,
        prompts: list[list[int]],
        at_once: int,
        source: Source,
        seconds: float = 0.0,
        teaching: bool = False,
    ) -> Race:
        """Every mode with `at_once` sequences running.

        All modes are at work at once and take short turns, the one that had least time first: a
        slow moment of the machine is a slow moment of all of them. Each writes the prompts' outputs
        as often as it takes to be at work for so many seconds, and never stops within a set.
        `auto` learns from its own steps; while `teaching` from the others' too.
        """
        job = f"drafts of {source}"
        entrants = {}
        for name, depth in (OFF, *MODES):
            knowledge = self.learned if teaching or depth is None else Knowledge()
            entrants[name] = self.entrant(prompts, at_once, depth, source, knowledge)
        auto = entrants["auto"].engine
        auto.prime(job, self.priors.get(source, ()))
        waiting = dict(entrants)
        while waiting:
            name, entrant = min(waiting.items(), key=lambda item: item[1].seconds)
            entrant.go(TURN_SEC)
            if not entrant.engine.idle:
                continue
            wanted = {key: self.known[key] for key in entrant.done}
            assert entrant.done == wanted, f"depth {name} changed an output"
            if entrant.seconds >= seconds:
                del waiting[name]
        self.priors[source] = _added(self.priors.get(source, ()), auto.lessons(job).counts)
        tokens = len(prompts) * self.new_tokens
        prices = common_prices({name: e.spent for name, e in entrants.items()})
        level = {name: priced_sec(e.spent, prices) for name, e in entrants.items()}
        spent = {name: e.spent for name, e in entrants.items()}
        return Race(
            {name: e.sets * tokens / e.seconds for name, e in entrants.items()},
            {name: e.sets * tokens / level[name] for name, e in entrants.items()},
            {name: s.pass_sec / (level[name] - s.rest_sec) for name, s in spent.items()},
            auto.stats,
        )

    def entrant(
        self,
        prompts: list[list[int]],
        at_once: int,
        depth: int | None,
        source: Source,
        knowledge: Knowledge,
    ) -> Entrant:
        proposers = () if depth == 0 else (self.proposer(source),)
        engine = Engine(self.runner, proposers, at_once, max_batch_tokens=4096, knowledge=knowledge)
        params = SamplingParams(max_tokens=self.new_tokens, ignore_eos=True)
        route = Cohort(f"drafts of {source}")
        requests = []
        for i, prompt in enumerate(prompts):
            past = tuple(self.known.get(str(i), ())) if source == HISTORY else ()
            requests.append(
                Request(str(i), tuple(prompt), params, i, depth=depth, route=route, past_ids=past)
            )
        return Entrant(engine, self.runner, requests)


def _added(
    known: tuple[AcceptanceCount, ...], new: tuple[AcceptanceCount, ...]
) -> tuple[AcceptanceCount, ...]:
    """As the store adds them."""
    sums = {rules.prior_key(count): count for count in known}
    for count in new:
        old = sums.get(rules.prior_key(count), replace(count, agreed=0.0, tested=0.0))
        agreed, tested = rules.learned(old.agreed, old.tested, count)
        sums[rules.prior_key(count)] = replace(count, agreed=agreed, tested=tested)
    return tuple(sums.values())


def measure(
    bed: Bed,
    prompts: list[list[int]],
    at_once: int,
    sources: list[Source],
    runs: int,
    seconds: float = 0.0,
) -> list[dict[str, Any]]:
    """One row per source; the first round warms up and teaches."""
    bed.look_up(prompts, at_once)
    races: dict[Source, list[Race]] = {source: [] for source in sources}
    for turn in range(runs + 1):
        for source in sources:
            race = bed.race(prompts, at_once, source, seconds, turn == 0)
            if turn:
                races[source].append(race)
    rows = []
    for source, run in races.items():
        stats, speeds = run[-1].stats, [race.speeds for race in run]
        passes = max(stats.verifier_passes, 1)
        luck = {name: statistics.median(race.luck[name] for race in run) for name in speeds[0]}
        rows.append(
            {
                "n": at_once,
                "acceptance": source,
                "off_tokens_per_sec": round(statistics.median(s["off"] for s in speeds), 1),
                **against_others(speeds),
                "at_common_prices": against_others([race.level for race in run]),
                "pass_sec_over_common": {name: round(ratio, 3) for name, ratio in luck.items()},
                "auto_mean_depth": round(stats.proposed / passes, 2),
                "auto_mean_accepted": round(stats.accepted / passes, 2),
            }
        )
    return rows


def against_others(runs: Seq[Mapping[str, float]]) -> dict[str, Any]:
    """`auto` against the best of the other modes, from tokens per second by mode in several runs.

    Medians of ratios within a run, so that the machine's mood cancels out.
    """
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
        "auto_over_best_chosen_apart": round(statistics.median(auto_over_best(runs)), 3),
    }


def auto_over_best(runs: Seq[Mapping[str, float]]) -> list[float]:
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


def keep(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows down; those of other points stay, and say so if another machine's they are."""

    def point(row: dict[str, Any]) -> tuple[int, Source]:
        return row["n"], row["acceptance"]

    here = machine()
    old: list[dict[str, Any]] = []
    if path.exists():
        report = json.loads(path.read_text())
        same = all(report["machine"].get(k) == v for k, v in here.items() if k != "date")
        old = [({} if same else {"machine": report["machine"]}) | row for row in report["rows"]]
    new = {point(row) for row in rows}
    both = sorted([*rows, *(row for row in old if point(row) not in new)], key=point)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": here, "rows": both}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("demo", "llama-230m"), default="demo")
    parser.add_argument("--n", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--acceptance", type=float, nargs="+", default=list(ACCEPTANCES))
    parser.add_argument("--real", action="store_true", help="draft with the demo's draft model")
    parser.add_argument("--history", action="store_true", help="a re-run over its own outputs")
    parser.add_argument("--waves", type=int, default=1, help="prompts for each sequence at once")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each mode in a run")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--work", type=Path, help="where the random model is kept")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.real and arguments.model != "demo":
        parser.error("--real needs --model demo: the random model has no draft model")
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.work or Path(temporary)
        model = demo_model() if arguments.model == "demo" else random_model(folder)
        bed = Bed(model, arguments.dtype, arguments.new_tokens)
        most = max(arguments.n) * arguments.waves
        prompts = demo_prompts() if arguments.real else random_prompts(model, most)
        sources: list[Source] = [*arguments.acceptance]
        suffix = ""
        if arguments.real or arguments.history:
            sources = [DRAFT_MODEL] if arguments.real else [HISTORY]
            suffix = "-real" if arguments.real else "-history"
        path = arguments.results / f"depth-{model.name}-{arguments.dtype}{suffix}.json"
        rows: list[dict[str, Any]] = []
        for n in arguments.n:
            chosen = (prompts * -(-n * arguments.waves // len(prompts)))[: n * arguments.waves]
            for row in measure(bed, chosen, n, sources, arguments.runs, arguments.seconds):
                size: dict[str, float] = {
                    "new_tokens": arguments.new_tokens,
                    "waves": arguments.waves,
                }
                size["turn_sec"] = TURN_SEC
                rows.append(row | size | {"runs": arguments.runs, "seconds": arguments.seconds})
                print(json.dumps(rows[-1]), flush=True)
            keep(path, rows)
    for name in ("auto_over_best", "auto_over_best_chosen_apart"):
        worst = min(rows, key=lambda row: float(row[name]))
        print(f"{name}: at worst {worst[name]}, at {worst}")


def demo_prompts() -> list[list[int]]:
    """The demo job's prompts, as token ids."""
    import pyarrow.parquet as pq

    from specbatch.pipeline.inputs.tokenizer import TextTokenizer

    folder = demo_model().folder
    texts = pq.read_table(folder.parents[1] / "prompts.parquet", columns=["prompt"])
    return TextTokenizer.load(str(folder)).encode_batch(texts.column(0).to_pylist())


if __name__ == "__main__":
    main()
