"""`make bench-engine`: this engine beside transformers' paths, in one run, as ratios.

For each number of prompts every contender runs once to warm up and three times for the median. The
result is one JSON file in `jobs/bench/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from specbatch.jobs.bench.contenders import (
    NEW_TOKENS,
    Contender,
    Ours,
    transformers_contenders,
)
from specbatch.jobs.bench.models import BenchModel, demo_model, random_model

RUNS = 3
REPLAYED = (0.0, 0.5, 0.7, 0.9)
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("demo", "llama-230m"), default="demo")
    parser.add_argument("--n", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--ours-only", action="store_true", help="leave transformers out")
    parser.add_argument("--runs", type=int, default=RUNS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = demo_model() if arguments.model == "demo" else random_model(Path(folder))
        rows = run(model, arguments)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"engine-{model.name}-{arguments.dtype}.json"
    path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    print(f"written to {path}")


def run(model: BenchModel, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per (contender, N), printed as they come."""
    ours = Ours(model, arguments.dtype)
    theirs: list[Contender] = []
    if not arguments.ours_only:
        theirs = transformers_contenders(model, getattr(torch, arguments.dtype))
    rows = []
    for n in arguments.n:
        prompts = model.prompts(n)
        contenders = [
            *theirs,
            Contender("depth 0", lambda p: ours.complete(p, depth=0)),
            *(
                Contender(
                    f"replay {a} auto",
                    lambda p, a=a: ours.complete(p, None, a),  # type: ignore[misc] # bound now
                )
                for a in REPLAYED
            ),
        ]
        for contender in contenders:
            if contender.only_n in (None, n):
                rows.append(measure(contender, model.name, n, prompts, ours, arguments.runs))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def measure(
    contender: Contender, model: str, n: int, prompts: list[list[int]], ours: Ours, runs: int
) -> dict[str, Any]:
    """Warm up once, then the median of `runs`."""
    contender.complete(prompts)
    seconds = []
    for _ in range(runs):
        begun = time.perf_counter()
        contender.complete(prompts)
        seconds.append(time.perf_counter() - begun)
    row: dict[str, Any] = {
        "model": model,
        "n": n,
        "contender": contender.name,
        "tokens_per_sec": round(n * NEW_TOKENS / statistics.median(seconds), 1),
        "seconds": [round(s, 4) for s in seconds],
    }
    if contender.name.startswith(("depth", "replay")):
        stats = ours.stats
        row |= {
            "outside_forward": round(1 - stats.forward_sec / stats.busy_sec, 4),
            "proposed": stats.proposed,
            "accepted": stats.accepted,
            "steps": stats.steps,
        }
    return row


def machine() -> dict[str, Any]:
    """What the figures were measured on, without its name."""
    import transformers

    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


if __name__ == "__main__":
    main()
