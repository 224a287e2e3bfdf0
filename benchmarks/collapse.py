"""`make bench-collapse`: drafts that stop fitting in the middle of a job, beside depth 0.

The first half of a job's prompts has drafts of which most are right, the second half of which
almost none are, as when prompts switch domain. Reports the speed over the second half, and what the
decision rows say.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from specbatch.benchmarks.contenders import random_prompts
from specbatch.benchmarks.depth import Bed
from specbatch.benchmarks.engine import RESULTS
from specbatch.jobs.bench.contenders import ReplayProposer
from specbatch.jobs.bench.machine import machine
from specbatch.jobs.bench.models import demo_model
from specbatch.pipeline.engines.contract import Cohort, Request
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.schemas.records import SamplingParams

BEFORE, AFTER = 0.8, 0.05


class Collapsing(ReplayProposer):
    """Right drafts for the first `half` requests, wrong ones for the others."""

    def __init__(self, outputs: dict[str, list[int]], half: int, vocab_size: int) -> None:
        super().__init__(outputs, BEFORE, vocab_size)
        wrong = ReplayProposer(outputs, AFTER, vocab_size)
        for name in outputs:
            if int(name) >= half:
                self._drafts[name] = wrong._drafts[name]


def run(bed: Bed, prompts: list[list[int]], at_once: int, auto: bool) -> tuple[float, list[str]]:
    """(seconds of the second half, the decisions); the halves overlap by what runs at once."""
    half = len(prompts) // 2
    proposers = (Collapsing(bed.known, half, bed.vocab_size),) if auto else ()
    engine = Engine(bed.runner, proposers, at_once, max_batch_tokens=4096, knowledge=bed.learned)
    params = SamplingParams(max_tokens=bed.new_tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add(
            Request(
                str(i), tuple(prompt), params, i, depth=None if auto else 0, route=Cohort("job")
            )
        )
    finished = 0
    middle = 0.0
    while not engine.idle:
        for done in engine.step():
            finished += 1
            if not auto:
                bed.known[done.request_id] = list(done.token_ids)
            if finished == half:
                middle = time.perf_counter()
    seconds = time.perf_counter() - middle
    rows = engine.lessons("job").decisions
    return seconds, [f"{d.action} {d.proposer}: {d.reason}" for d in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--waves", type=int, default=16, help="prompts for each sequence at once")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = demo_model()
    bed = Bed(model, "bfloat16", 128)
    rows: list[dict[str, Any]] = []
    for n in arguments.n:
        prompts = random_prompts(model, n * arguments.waves)
        ratios: list[float] = []
        decisions: list[str] = []
        for turn in range(arguments.runs + 1):
            off, _ = run(bed, prompts, n, auto=False)
            auto, decisions = run(bed, prompts, n, auto=True)
            if turn:
                ratios.append(off / auto)
        rows.append(
            {
                "n": n,
                "second_half_over_off": round(statistics.median(ratios), 3),
                "decisions": decisions,
            }
        )
        print(json.dumps(rows[-1], indent=1), flush=True)
    arguments.results.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine(), "before": BEFORE, "after": AFTER, "rows": rows}
    (arguments.results / "collapse-demo.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
