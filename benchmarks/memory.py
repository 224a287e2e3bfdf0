"""`make bench-memory`: what an engine announces beside what it takes with its caches full.

Each case runs in a process of its own. Prompts that have nothing in common fill the caches, for
what a finished one leaves there stays until its blocks are needed. All are drafted for as far as a
step goes, so that the largest passes take place too. One JSON file in `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from specbatch.jobs.bench.machine import machine
from specbatch.jobs.bench.models import demo_model, random_model
from specbatch.pipeline.engines.contract import Request
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.exact.host import EngineHost
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.schemas.records import SamplingParams
from specbatch.schemas.spec import EngineSpec

RESULTS = Path(__file__).parent / "results"
TOLERANCE = 0.10
MAX_SEQUENCES = 64
NEW_TOKENS = 17  # 64 drafts of 16 tokens are as many as a step may have
# Enough for the caches to outweigh what varies from run to run.
CASES = (("demo", 128), ("llama-230m", 1024))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[name for name, _ in CASES])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    parser.add_argument("--folder", type=Path, help="where a random model is kept")
    parser.add_argument("--kv-cache-mib", type=int)
    parser.add_argument("--one", action="store_true", help="measure in this very process")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(**_only_case(arguments))))
        return
    with tempfile.TemporaryDirectory() as made:
        rows = run(arguments, arguments.folder or Path(made))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "memory.json"
    path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    print(f"written to {path}")
    if any(abs(row["peak_to_announced"] - 1) > TOLERANCE for row in rows):
        sys.exit(f"a peak is not within {TOLERANCE:.0%} of what was announced")


def run(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """One row per case, printed as they come."""
    rows = []
    for name, kv_cache_mib in CASES:
        for dtype in ("bfloat16", "float32"):
            if arguments.model in (None, name) and arguments.dtype in (None, dtype):
                size = arguments.kv_cache_mib or kv_cache_mib
                rows.append(measure_apart(name, dtype, size, folder))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def measure_apart(model: str, dtype: str, kv_cache_mib: int, folder: Path) -> dict[str, Any]:
    """`measure` in a process of its own."""
    if model != "demo":
        random_model(folder)  # making it must not be part of the peak
    done = subprocess.run(
        [
            *(sys.executable, "-m", "specbatch.benchmarks.memory", "--one", "--model", model),
            *("--dtype", dtype, "--kv-cache-mib", str(kv_cache_mib), "--folder", str(folder)),
        ],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(model: str, dtype: str, kv_cache_mib: int, folder: Path) -> dict[str, Any]:
    """Load, announce, fill the caches, and read the peaks of both."""
    verifier = demo_model() if model == "demo" else random_model(folder)
    draft = verifier.folder.parent / "draft" if model == "demo" else None
    host = EngineHost(
        inspect_model(str(verifier.folder)),
        inspect_model(str(draft)) if draft else None,
        max_sequences=MAX_SEQUENCES,
        max_batch_tokens=2048,
        kv_cache_bytes=kv_cache_mib << 20,
    )
    engine = host.make_engine(EngineSpec.model_validate({"dtype": dtype}))
    assert host.memory is not None, "a made engine is announced"
    load_peak = peak_bytes()
    forget_peak()
    # So short that all sequences find room at once: only then is the largest pass reached.
    share = host.memory.cache_tokens // MAX_SEQUENCES
    prompt_tokens = min(480, share - 64, host.model.context_tokens - 64)
    pre_drafted = draft is None
    fed = fill(engine, host.memory.cache_tokens, prompt_tokens, verifier.vocab_size, pre_drafted)
    peak, announced = peak_bytes(), host.memory
    assert load_peak is not None, "only Linux says"
    assert peak is not None, "only Linux says"
    ours = announced.total - announced.process
    return {
        "model": model,
        "dtype": dtype,
        "announced": {
            part: getattr(announced, part)
            for part in ("process", "weights", "kv_cache", "workspace", "total")
        },
        "peak": peak,
        "peak_to_announced": round(peak / announced.total, 4),
        "peak_to_announced_without_process": round((peak - announced.process) / ours, 4),
        "load_peak": load_peak,
        "tokens_fed": fed,
    }


def fill(
    engine: Engine, cache_tokens: int, prompt_tokens: int, vocab_size: int, pre_drafted: bool
) -> int:
    """Feed prompts of their own until every block has been used; how many tokens that was.

    Drafts are the draft model's, or `pre_drafted` and random.
    """
    rng = random.Random(0)

    def some(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, vocab_size) for _ in range(count))

    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    # A finished sequence leaves its full blocks only: some more are needed than would fit.
    count = max(MAX_SEQUENCES, int(1.2 * cache_tokens / prompt_tokens) + 2)
    for i in range(count):
        drafts = some(NEW_TOKENS) if pre_drafted else ()
        request = Request(str(i), some(prompt_tokens), params, i, drafts, depth=NEW_TOKENS - 1)
        engine.add(request)
    while not engine.idle:
        engine.step()
    return count * (prompt_tokens + NEW_TOKENS)


def peak_bytes() -> int | None:
    """Peak resident memory of this process; None where the system does not report it."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(x.split()[1]) << 10 for x in lines if x.startswith("VmHWM:")), None)


def forget_peak() -> None:
    """Let the peak begin anew at what is in memory now."""
    Path("/proc/self/clear_refs").write_text("5")


def _only_case(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("model", "dtype", "kv_cache_mib", "folder")
    return {name: getattr(arguments, name) for name in names}


if __name__ == "__main__":
    main()
