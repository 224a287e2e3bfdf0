"""`make bench-gpu`: all there is to know of the GPU path, in one run on a machine that has a GPU.

    tests      the Triton kernels and the engine on them, by the test bodies of every other machine
    rooflines  each kernel's time beside what the device was seen to move and to compute
    engine     tokens/s at depth 0 and with replayed drafts, beside `generate` and `generate_batch`

The result is one JSON file in `benchmarks/results/`. Without a GPU it says so and exits with 2.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specbatch.benchmarks.contenders import (
    DEPTH_0,
    NEW_TOKENS,
    Contender,
    our_contenders,
    random_prompts,
    transformers_contenders,
)
from specbatch.benchmarks.engine import RESULTS
from specbatch.benchmarks.measuring import Row, measure
from specbatch.jobs.bench.contenders import OURS, Completed, Ours, Prompts
from specbatch.jobs.bench.machine import machine
from specbatch.jobs.bench.models import LLAMA_230M, MADE, random_model
from specbatch.jobs.bench.peer_client import PeerError

TESTS = (
    "tests/kernels/test_implementations.py",
    "tests/kernels/test_paged_attention.py",
    "tests/kernels/test_row_kernels.py",
    "tests/kernels/test_triton_compiles.py",
    "tests/engine/test_triton_path.py",
    "tests/engine/test_graphs.py",
    "tests/engine/test_invariance.py",
    "tests/engine/test_quantised.py",
)
PARTS = ("tests", "rooflines", "engine")
REPLAYED = (0.5, 0.7, 0.9)
MODELS = {
    MADE: LLAMA_230M,
    "llama-1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--n", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: this machine has no GPU that torch can use", file=sys.stderr)
        raise SystemExit(2)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"gpu-{_slug(torch.cuda.get_device_name())}.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    found["machine"] = machine() | gpu()
    parts: dict[str, Callable[[], Any]] = {
        "tests": tests,
        "rooflines": rooflines,
        "engine": lambda: engine(arguments),
    }
    for name in arguments.parts:
        found[name] = parts[name]()
        path.write_text(json.dumps(found, indent=1) + "\n")  # what is known outlives a crash
    print(f"written to {path}")
    if found.get("tests", {}).get("exit_code"):
        raise SystemExit(1)


def gpu() -> dict[str, Any]:
    """What the figures were measured on."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def tests() -> dict[str, Any]:
    """Run them in a process of their own, on the GPU."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *TESTS],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(done.stdout, flush=True)
    return {
        "exit_code": done.returncode,
        "summary": done.stdout.strip().splitlines()[-1:],
        "failed": re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE),
    }


def rooflines() -> dict[str, Any]:
    from specbatch.benchmarks.roofline import all_work, cuda_seconds, measured, roofs

    limits = roofs(cuda_seconds, "cuda")
    rows = []
    for work in all_work("cuda"):
        rows.append(measured(work, cuda_seconds, limits))
        print(json.dumps(rows[-1]), flush=True)
    return {
        "measured_gb_per_sec": round(limits.bytes_per_sec / 1e9, 1),
        "measured_bf16_tflops": round(limits.flops_per_sec / 1e12, 1),
        "kernels": rows,
    }


def engine(arguments: argparse.Namespace, device: str = "cuda") -> list[Row]:
    """One row per (model, contender, N); ours bitwise and fast, recorded or not."""
    rows: list[Row] = []
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            model = random_model(Path(folder), name, MODELS[name])
            contenders = [
                *transformers_contenders(model, torch.bfloat16, device),
                *_ours("bitwise", Ours(model, "bfloat16", NEW_TOKENS, device, "bitwise")),
                *_ours("fast", Ours(model, "bfloat16", NEW_TOKENS, device, "fast")),
                *_ours(
                    "fast, not recorded",
                    Ours(model, "bfloat16", NEW_TOKENS, device, "fast", graphs=False),
                ),
            ]
            for n in arguments.n:
                present = [harmless(_watched(c)) for c in contenders if _takes_part(c, n)]
                rows += measure(present, name, random_prompts(model, n), arguments.runs)
    return rows


def _ours(kind: str, ours: Ours) -> list[Contender]:
    return [
        replace(contender, name=f"{contender.name}, {kind}")
        for contender in our_contenders(ours, REPLAYED)
    ]


def _takes_part(contender: Contender, n: int) -> bool:
    """Drafts save nothing where sequences alone fill the device."""
    drafts = contender.engine == OURS and not contender.name.startswith(DEPTH_0)
    return contender.only_n in (None, n) and (n <= 32 or not drafts)


def _watched(contender: Contender) -> Contender:
    """The same, with the GPU's memory among its facts."""

    def complete(prompts: Prompts) -> Completed:
        torch.cuda.reset_peak_memory_stats()
        completed = contender.complete(prompts)
        facts = dict(completed.facts)
        facts.pop("outside_forward", None)  # a pass is only queued where that is timed
        # All contenders' models lie there at once: what differs is what a run takes beside them.
        facts["peak_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        return replace(completed, facts=facts)

    return replace(contender, complete=complete)


def harmless(contender: Contender) -> Contender:
    """The same, but another's error becomes its row's: it must not cost us ours."""
    if contender.engine == OURS:
        return contender

    def complete(prompts: Prompts) -> Completed:
        try:
            return contender.complete(prompts)
        except Exception as error:
            raise PeerError(repr(error)[:300]) from error

    return replace(contender, complete=complete)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    main()
