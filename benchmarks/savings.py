"""`make bench-savings`: is what jobs are told to save what they save? On the demo pair.

Pairs: the same prompts with drafts (`auto`) and at depth 0, in turns. Of each job with drafts the
engine's sums say what its steps would have taken at depth 0; beside it stands what the steps of the
jobs at depth 0 did take, decode plus drafting. The two are compared over all pairs.

Shams: jobs with a proposer that promises drafts and makes none, in turns with jobs at depth 0 as
well. What they are told to have saved ought to be what was measured: nothing, or the little that
choosing drafts costs.

Knowledge of the machine goes from job to job, as the store keeps it.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specbatch.benchmarks.depth import KV_CACHE_BYTES, demo_prompts
from specbatch.benchmarks.engine import RESULTS
from specbatch.jobs.bench.machine import machine
from specbatch.jobs.bench.models import demo_model
from specbatch.pipeline.engines.contract import Cohort, Request
from specbatch.pipeline.engines.exact.draft_model import DraftModelProposer
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.exact.model.runner import ModelRunner
from specbatch.pipeline.engines.models.draft_names import DRAFT_MODEL
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.policy.costs.controls import NOTHING_MEASURED, Measured
from specbatch.pipeline.policy.costs.savings import at_depth_0, half_width
from specbatch.pipeline.policy.depth import Controller
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.schemas.records import SamplingParams
from specbatch.schemas.speculation import AcceptanceCount

PLACEBO = "placebo"
WORTH = 0.02  # acceptance above the one from which on drafts pay: what a placebo is believed
WITHIN = 0.05


class Placebo(Proposer):
    """A proposer that always has drafts to offer, and makes none."""

    name = PLACEBO

    def available(self, sequence: Sequence) -> int:
        return max(0, min(4, sequence.remaining - 1))

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:  # noqa: ARG002 - the same
        return [[] for _ in sequences]


@dataclass(frozen=True, slots=True)
class Job:
    """What an engine's sums say of one job. Times are seconds, of steps without prompts."""

    kind: str
    measured: Measured
    busy: float  # of the engine, all steps

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "busy": self.busy} | estimate(self.measured)


def estimate(measured: Measured) -> dict[str, Any]:
    """The saving as it is reported: time at depth 0 by time taken, and half of its interval."""
    found: dict[str, Any] = {
        "taken": measured.taken,
        "tokens": measured.tokens,
        "drafting_steps": measured.drafting_steps,
        "control_steps": measured.control_steps,
        "reported": None,
        "half_width": None,
    }
    if measured.control_steps or not measured.drafting_steps:
        half = half_width(measured)
        found["reported"] = at_depth_0(measured) / measured.taken
        found["half_width"] = None if half is None else half / measured.taken
    return found


class Bench:
    """The demo pair, loaded once; each job has an engine of its own."""

    def __init__(self, at_once: int, waves: int, new_tokens: int, dtype: str) -> None:
        folder = demo_model().folder
        self.runner = self._load(folder, dtype)
        self.drafting = self._load(folder.parent / "draft", dtype)
        prompts = demo_prompts()
        wanted = at_once * waves
        self.prompts = (prompts * -(-wanted // len(prompts)))[:wanted]
        self.at_once = at_once
        # Outputs end at different times, as in real jobs: were all alike, those of depth 0 would
        # end together, and no step there would have few sequences.
        draw = random.Random(0)
        self.lengths = [draw.randint(new_tokens // 2, 3 * new_tokens // 2) for _ in self.prompts]
        self.knowledge = Knowledge()
        self.priors: tuple[AcceptanceCount, ...] = ()

    @staticmethod
    def _load(folder: Path, dtype: str) -> ModelRunner:
        loaded = load_model(inspect_model(str(folder)), dtype)
        return ModelRunner(loaded, kv_cache_bytes=KV_CACHE_BYTES, share_prefixes=False)

    def auto(self) -> Job:
        cost = self.knowledge.draft_time_of(DRAFT_MODEL)
        return self._job("auto", DraftModelProposer(self.drafting, pass_time=cost), None)

    def off(self) -> Job:
        return self._job("off", None, 0)

    def sham(self) -> Job:
        self._believe()
        return self._job("sham", Placebo(), None)

    def _believe(self) -> None:
        """A placebo's drafts are believed to pay, a little; no test will ever tell otherwise."""
        known = self.knowledge.acceptance_of(PLACEBO)
        pays = Controller(self.knowledge).break_even(self.at_once, None)
        known.tested = 1000.0
        known.agreed = 1000.0 * min(0.99, pays + WORTH)

    def _job(self, kind: str, proposer: Proposer | None, depth: int | None) -> Job:
        engine = Engine(
            self.runner,
            () if proposer is None else (proposer,),
            self.at_once,
            max_batch_tokens=4096,
            knowledge=self.knowledge,
        )
        engine.prime(kind, self.priors if kind == "auto" else ())
        for i, (prompt, length) in enumerate(zip(self.prompts, self.lengths, strict=True)):
            params = SamplingParams(max_tokens=length, ignore_eos=True)
            request = Request(str(i), tuple(prompt), params, i, depth=depth, route=Cohort(kind))
            engine.add(request)
        while not engine.idle:
            engine.step()
        lessons = engine.lessons(kind)
        if kind == "auto":
            self.priors = lessons.counts
        return Job(kind, lessons.measured, engine.stats.busy_sec)


def pairs_together(pairs: Seq[tuple[Job, Job]]) -> dict[str, Any]:
    """(auto, off) of each, by the sums of all."""
    auto = sum((job.measured for job, _ in pairs), NOTHING_MEASURED)
    off = sum((job.measured for _, job in pairs), NOTHING_MEASURED)
    found = {"pairs": len(pairs)} | estimate(auto)
    found["measured"] = (off.taken / off.tokens) / (auto.taken / auto.tokens)
    found["busy_ratio"] = sum(off.busy for _, off in pairs) / sum(auto.busy for auto, _ in pairs)
    if found["reported"] is not None:
        found["reported_over_measured"] = found["reported"] / found["measured"]
        found["within_5_percent"] = abs(found["reported_over_measured"] - 1.0) <= WITHIN
    return found


def shams_together(shams: Seq[tuple[Job, Job]]) -> dict[str, Any]:
    """(sham, off) of each: as for pairs, and how many intervals hold what was measured beside it.

    Choosing drafts takes a little time although there are none, so that is not quite 1.
    """
    together = pairs_together(shams)
    estimates = [estimate(sham.measured) for sham, _ in shams]
    sure = [one for one in estimates if one["half_width"] is not None]
    inside = sum(abs(one["reported"] - together["measured"]) <= one["half_width"] for one in sure)
    return together | {"with_interval": len(sure), "holding_what_was_measured": inside}


def in_turns(
    first: Callable[[], Job], second: Callable[[], Job], turns: int
) -> list[tuple[Job, Job]]:
    """Jobs of both; who goes first takes turns, too."""
    done: list[tuple[Job, Job]] = []
    for turn in range(turns):
        if turn % 2:
            done.append((first(), second()))
        else:
            done.append((second(), first())[::-1])
        print(json.dumps([job.as_json() for job in done[-1]]), flush=True)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--shams", type=int, default=10)
    parser.add_argument("--n", type=int, default=2, help="sequences at once")
    parser.add_argument("--waves", type=int, default=32, help="prompts for each sequence at once")
    parser.add_argument("--new-tokens", type=int, default=192, help="on average")
    parser.add_argument("--dtype", default="float32", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    bench = Bench(arguments.n, arguments.waves, arguments.new_tokens, arguments.dtype)
    for job in (bench.off(), bench.auto()):
        print(f"warm-up {job.kind}: {job.busy:.2f} s", flush=True)
    pairs = in_turns(bench.auto, bench.off, arguments.pairs)
    shams = in_turns(bench.sham, bench.off, arguments.shams)
    found: dict[str, Any] = {"machine": machine(), "n": arguments.n, "waves": arguments.waves}
    found |= {"new_tokens": arguments.new_tokens, "dtype": arguments.dtype}
    if pairs:
        found["pooled_pairs"] = pairs_together(pairs)
    if shams:
        found["pooled_shams"] = shams_together(shams)
    found["jobs"] = [job.as_json() for pair in (*pairs, *shams) for job in pair]
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / "savings-demo.json").write_text(json.dumps(found, indent=1) + "\n")
    for name in ("pooled_pairs", "pooled_shams"):
        print(name, json.dumps(found.get(name)))


if __name__ == "__main__":
    main()
