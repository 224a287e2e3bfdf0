"""`make bench-gpu`: all there is to know of the GPU path, in steps that can be resumed.

    tests    the Triton kernels and the engine on them, by the test bodies of every other machine
    bits     at which numbers of rows a row keeps its bits: our product, torch's, our attention
    kernels  each kernel's time beside what the device was seen to move and to compute
    llama-*  tokens/s of the engine at depth 0 and with replayed drafts, beside `generate`

Each step is a process of its own that takes at most ten minutes. The result is one JSON file in
`benchmarks/results/`, written after every row; a step that is complete there is not run again.
`--rehearse` runs all of it without a GPU, on the smallest sizes, and keeps nothing. Without a GPU
it says so and exits with 2.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.benchmarks.contenders import (
    DEPTH_0,
    NEW_TOKENS,
    Contender,
    our_contenders,
    random_prompts,
    transformers_contenders,
)
from specbatch.benchmarks.engine import RESULTS
from specbatch.benchmarks.measuring import measure
from specbatch.benchmarks.roofline import BLOCK, all_work, cuda_seconds, measured, roofs
from specbatch.jobs.bench.contenders import OURS, Completed, Ours, Prompts
from specbatch.jobs.bench.machine import machine
from specbatch.jobs.bench.models import LLAMA_230M, MADE, random_model
from specbatch.jobs.bench.peer_client import PeerError
from specbatch.kernels.linear.triton import linear
from specbatch.kernels.paged_attention import triton as attention
from specbatch.kernels.paged_attention.contract import RaggedBatch
from specbatch.pipeline.engines.exact.model.batch_invariant.row_tiles import telling

TESTS = (
    "tests/kernels/test_implementations.py",
    "tests/kernels/test_paged_attention.py",
    "tests/kernels/test_row_kernels.py",
    "tests/kernels/test_grammar_mask.py",
    "tests/engine/test_triton_path.py",
    "tests/engine/test_graphs.py",
    "tests/engine/test_invariance.py",
)
STEP_SEC = 600
REPLAYED = (0.7,)
KV_CACHE_BYTES = 8 << 30
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
    "llama-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
SMALL = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
STEPS = ("tests", "bits", "kernels", *MODELS)
ROOT = Path(__file__).resolve().parents[1]
Save = Callable[[Any], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", nargs="*", metavar="step", help=f"{', '.join(STEPS)}; all of them")
    parser.add_argument("--n", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="run steps that are complete, too")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, on small sizes")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)  # in this process
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if unknown := set(arguments.steps) - set(STEPS):
        parser.error(f"no step {', '.join(sorted(unknown))}: there are {', '.join(STEPS)}")
    if not arguments.rehearse and not torch.cuda.is_available():
        print("error: this machine has no GPU that torch can use", file=sys.stderr)
        raise SystemExit(2)
    if arguments.alone:
        run_step(arguments.steps[0], arguments)
        return
    if not arguments.rehearse:
        raise SystemExit(run_steps(arguments.steps or STEPS, sys.argv[1:], arguments))
    with tempfile.TemporaryDirectory() as folder:
        arguments.results = Path(folder)
        given = [*sys.argv[1:], "--results", folder]
        raise SystemExit(run_steps(arguments.steps or STEPS, given, arguments))


def run_steps(steps: tuple[str, ...], given: list[str], arguments: argparse.Namespace) -> int:
    """Each in a process of its own; 1 if one of them failed."""
    path = _path(arguments)
    options = [word for word in given if word not in STEPS]
    environment = dict(os.environ)
    if arguments.rehearse:
        environment["TRITON_INTERPRET"] = "1"
    failed = []
    for name in steps:
        if not arguments.again and _found(path).get(name, {}).get("complete"):
            print(f"{name}: complete in {path}; --again repeats it")
            continue
        command = [sys.executable, "-m", __spec__.name, name, "--alone", *options]
        try:
            subprocess.run(command, check=True, timeout=STEP_SEC, env=environment)
        except subprocess.SubprocessError as error:
            print(f"{name} failed: {error}", file=sys.stderr)
            failed.append(name)
    if not arguments.rehearse:
        print(f"written to {path}")
    return 1 if failed else 0


def run_step(name: str, arguments: argparse.Namespace) -> None:
    """Its rows go to the file as they come: what is known outlives a crash."""
    device, small = ("cpu", True) if arguments.rehearse else ("cuda", False)
    path, rows = _path(arguments), []

    def save(row: Any) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        write({"complete": False, "rows": rows})

    def write(step: dict[str, Any]) -> None:
        found = _found(path)
        found["machine"] = machine() | ({} if small else gpu())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found | {name: step}, indent=1) + "\n")

    run: dict[str, Callable[[Save], None]] = {
        "tests": partial(tests, small),
        "bits": partial(bits, device, small),
        "kernels": partial(kernels, device, small),
    }
    run.get(name, partial(engine, name, arguments, device, small))(save)
    write({"complete": True, "rows": rows})


def _path(arguments: argparse.Namespace) -> Path:
    device = "rehearsal" if arguments.rehearse else torch.cuda.get_device_name()
    results: Path = arguments.results
    return results / f"gpu-{_slug(device)}.json"


def _found(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


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


def tests(small: bool, save: Save) -> None:
    """In a process of their own, on the GPU; raises `SystemExit` if one fails."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "--tier=all", "-n", str(os.cpu_count())]
    command += ["--collect-only", *TESTS] if small else TESTS
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode:
        print(done.stdout, flush=True)
    summary = [line for line in done.stdout.splitlines() if re.search(r" in [0-9.]+s", line)][-1:]
    save({"exit_code": done.returncode, "summary": summary, "failed": failed})
    if done.returncode:
        raise SystemExit(1)


def bits(device: str, small: bool, save: Save) -> None:
    """`differ`: numbers of rows, or pieces, at which a row's bits are not those it has alone."""
    counts = [1, 2, 5, 8, 16, 17, 33, 64, 65, 128, 129, 256, 512, 1024, 2048]
    shapes = [(4096, 4096), (4096, 14336), (14336, 4096), (4096, 1024), (2048, 128256)]
    if small:
        counts, shapes = counts[:3], [(128, 64)]
    for dtype in (torch.bfloat16, torch.float16):
        for inputs, outputs in shapes:
            layer = torch.nn.Linear(inputs, outputs, bias=False, dtype=dtype, device=device)
            rows = telling(layer.requires_grad_(False))
            rows = rows.repeat(-(-counts[-1] // len(rows)), 1)
            for name, product in (("ours", linear), ("torch", F.linear)):
                alone = product(rows[1:2], layer.weight)
                differ = [
                    count
                    for count in counts[1:]
                    if not torch.equal(product(rows[:count], layer.weight)[1:2], alone)
                ]
                row = {"kernel": "linear", "by": name, "dtype": str(dtype)[6:]}
                save(row | {"inputs": inputs, "outputs": outputs, "differ": differ})
    for heads, kv_heads, head_dim in ((32, 8, 128), (8, 1, 64), (28, 4, 128), (16, 8, 256)):
        for context in (70,) if small else (63, 64, 65, 4097, 32768):
            ways = attention_differs(heads, kv_heads, head_dim, context, device, small)
            shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
            save({"kernel": "paged_attention", **shape, "context": context, "differ": ways})


def attention_differs(
    heads: int, kv_heads: int, head_dim: int, context: int, device: str, small: bool
) -> list[str]:
    """bfloat16: the ways of feeding the last tokens that give one of them other bits."""
    generator = torch.Generator().manual_seed(0)
    blocks, tokens = -(-context // BLOCK), 10 if small else 60

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    keys, values = (random(blocks + 1, BLOCK, kv_heads, head_dim) for _ in range(2))
    query = random(tokens, heads, head_dim)

    def run(piece: int, company: int = 0) -> Tensor:
        out = []
        for begin in range(0, tokens, piece):
            mine = query[begin : begin + piece]
            fed = torch.cat((mine, query[:1].expand(company, -1, -1)))
            starts = [0, *range(len(mine), len(fed) + 1)]
            batch = RaggedBatch(
                starts,
                [context - tokens + begin + len(mine)] + [7] * company,
                [list(range(1, blocks + 1))] * (1 + company),
                torch.zeros(len(fed), dtype=torch.int64, device=device),
            )
            attended = attention.paged_attention(fed, keys, values, batch, head_dim**-0.5)
            out.append(attended[: len(mine)])
        return torch.cat(out)

    whole = run(tokens)
    ways = {
        "one by one": (1, 0),
        "in fives": (5, 0),
        "in nines": (9, 3),
        "in company": (tokens, 200),
    }
    return [name for name, way in ways.items() if not torch.equal(run(*way), whole)]


def kernels(device: str, small: bool, save: Save) -> None:
    seconds = host_seconds if small else cuda_seconds
    limits = roofs(seconds, device, *((64, 1 << 20) if small else ()))
    save({
        "measured_gb_per_sec": round(limits.bytes_per_sec / 1e9, 1),
        "measured_bf16_tflops": round(limits.flops_per_sec / 1e12, 1),
    })  # fmt: skip
    for work in all_work(device, small):
        save(measured(work, seconds, limits))


def host_seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def engine(name: str, arguments: argparse.Namespace, device: str, small: bool, save: Save) -> None:
    """One row per (contender, N), of this model; ours bitwise and fast."""
    with _memory_folder() as folder:
        with torch.device(device):
            model = random_model(folder, name, SMALL if small else MODELS[name])
        ours = partial(Ours, model, "bfloat16", NEW_TOKENS, device, kv_cache_bytes=KV_CACHE_BYTES)
        contenders = [
            *transformers_contenders(model, torch.bfloat16, device)[:1],
            *_ours("bitwise", ours("bitwise", graphs=not small)),
            *_ours("fast", ours("fast", graphs=not small)),
        ]
        for n in [2] if small else arguments.n:
            present = [harmless(_watched(c)) for c in contenders if _takes_part(c, n)]
            for row in measure(present, name, random_prompts(model, n), arguments.runs):
                save(row)


@contextmanager
def _memory_folder() -> Iterator[Path]:
    """A folder in memory where there is one: a model of 16 GB is written and read at once."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)


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
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        completed = contender.complete(prompts)
        facts = dict(completed.facts)
        facts.pop("outside_forward", None)  # a pass is only queued where that is timed
        # All contenders' models lie there at once: what differs is what a run takes beside them.
        if on_gpu:
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
