"""`make bench-engine`: this engine beside transformers' paths and other engines, in one run.

For each number of prompts every contender runs once to warm up and three times for the median, in
turns. The result is one JSON file in `benchmarks/results/`, written after each N, and a table.
OpenVINO GenAI, vLLM and llama.cpp take part where SPECBATCH_BENCH_OPENVINO_PYTHON,
SPECBATCH_BENCH_VLLM_PYTHON and SPECBATCH_BENCH_LLAMA_PYTHON name an interpreter that has them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from specbatch.benchmarks.contenders import (
    NEW_TOKENS,
    our_contenders,
    random_prompts,
    transformers_contenders,
)
from specbatch.benchmarks.measuring import measure
from specbatch.benchmarks.peer_roster import Roster
from specbatch.benchmarks.report import Results, print_table
from specbatch.jobs.bench.contenders import Ours, looked_at
from specbatch.jobs.bench.isa import forced_level, restart_held
from specbatch.jobs.bench.machine import Idling, machine
from specbatch.jobs.bench.models import demo_model, random_model

RUNS = 3
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("demo", "llama-230m"), default="demo")
    parser.add_argument("--n", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--ours-only", action="store_true", help="into a file of its own")
    parser.add_argument("--skip", nargs="+", default=[], metavar="CONTENDER")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--work", type=Path, help="keep made and converted models in this folder")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON file")
    arguments = parser.parse_args()
    if not arguments.ours_only:
        restart_held(forced_level(os.environ))
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        work = arguments.work or Path(folder)
        results = run(work.resolve(), arguments)
    print_table(results.rows)
    print(f"written to {results.path}")


def run(work: Path, arguments: argparse.Namespace) -> Results:
    """Measure every N, writing the file after each."""
    model = demo_model() if arguments.model == "demo" else random_model(work)
    dtype, runs = arguments.dtype, arguments.runs
    theirs = [] if arguments.ours_only else transformers_contenders(model, getattr(torch, dtype))
    environment = {} if arguments.ours_only else os.environ
    isa = None if arguments.ours_only else forced_level(os.environ)
    with Roster(environment, model, dtype, arguments.threads, work, arguments.skip, isa) as roster:
        roster.start()
        ours = Ours(model, dtype, NEW_TOKENS)
        contenders = [*theirs, *roster.contenders, *our_contenders(ours)]
        if not arguments.ours_only:
            contenders = [
                c if c in roster.contenders else replace(c, complete=looked_at(c.complete, isa))
                for c in contenders
            ]
        idling = Idling(roster.processes)
        header = {"machine": machine(), "runs": runs, "peers": roster.versions}
        if not arguments.ours_only:
            header["not_installed"] = roster.not_installed
        suffix = "-ours" if arguments.ours_only else f"-{isa}" if isa else ""
        path = arguments.results / f"engine-{model.name}-{dtype}{suffix}.json"
        results = Results(path, header)
        for n in arguments.n:
            present = [
                c for c in contenders if c.only_n in (None, n) and c.name not in arguments.skip
            ]
            results.add(measure(present, model.name, random_prompts(model, n), runs, idling))
    return results


if __name__ == "__main__":
    main()
