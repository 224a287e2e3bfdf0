"""`make bench-kernels`: each C kernel beside what the processor can do, at every level it has.

The least time of a kernel is what its bytes take at the speed of a plain read by as many threads,
or what its operations take at the speed of the library's best large product, whichever is longer.
Bytes are counted once, also where operands stay in a cache: a fraction above 1 means a cache.
Products are also timed beside `torch.nn.functional.linear`, held to the same level, in turns.
Every level has a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.benchmarks.engine import RESULTS
from specbatch.jobs.bench.isa import limits
from specbatch.jobs.bench.machine import machine
from specbatch.kernels import native
from specbatch.kernels.decoder.contract import (
    BLOCK_SIZE,
    DecoderBatch,
    DecoderShape,
    DecoderWeights,
    LayerWeights,
)
from specbatch.kernels.decoder.cpu import Decoder
from specbatch.kernels.paged_attention.contract import RaggedBatch
from specbatch.kernels.verify import cpu as verify
from specbatch.kernels.verify.contract import SamplingRows

# The projections of the 230M model: qkv, gate and up, down, and its head.
PRODUCTS = ((1536, 1024), (5632, 1024), (1024, 2816), (32000, 1024))
SHAPES = {
    "demo": DecoderShape(6, 256, 8, 4, 32, 640, 2048, 0, 1e-5, 32**-0.5),
    "llama-230m": DecoderShape(16, 1024, 16, 4, 64, 2816, 32000, 0, 1e-5, 64**-0.5),
}
CONTEXT = 128  # tokens, of which the last is fed
PHASES = ("norms", "products", "placing", "attention", "head")  # of csrc/decoder.h
TURNS = 9
BYTES_AT_ONCE = 400 << 20  # weights per turn, more than any cache holds
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--levels", nargs="*", default=native.available())
    parser.add_argument("--n", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--one-level", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    torch.set_num_threads(asked.threads)
    if asked.one_level:
        print(json.dumps(rows_of_level(asked.n, asked.threads)))
        return
    rows: list[Row] = []
    for level in asked.levels:
        if level == "portable":  # the definition, which has no bar to reach
            continue
        rows += _in_its_own_process(level, asked)
    asked.results.mkdir(parents=True, exist_ok=True)
    path = asked.results / f"native-kernels-{asked.levels[0]}.json"
    path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    print(f"wrote {path.name}")


def _in_its_own_process(level: str, asked: argparse.Namespace) -> list[Row]:
    """The libraries choose their instructions as they load, so a level needs a new process."""
    environment = {**os.environ, **limits(level), native.FORCED_BY: level}
    command = [sys.executable, "-m", __spec__.name, "--one-level", level]
    command += ["--n", *map(str, asked.n), "--threads", str(asked.threads)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: list[Row] = json.loads(done.stdout.splitlines()[-1])
    for row in found:
        row["level"] = level
        print(json.dumps(row), flush=True)
    return found


def rows_of_level(ns: Sequence[int], threads: int) -> list[Row]:
    level = native.library().level
    rows: list[Row] = []
    for dtype in (torch.float32, torch.bfloat16):
        peak = max(_peak(dtype), _peak(torch.float32))
        speed = _read_speed()
        for n, k in PRODUCTS:
            rows += [_product(dtype, m, n, k, threads, peak) for m in ns]
        for name, shape in SHAPES.items():
            rows += [row for m in ns for row in _step(name, shape, dtype, m, speed, peak)]
    torch_level = torch.backends.cpu.get_cpu_capability()
    return [{"level": level, "torch_level": torch_level, "threads": threads, **row} for row in rows]


def _times(runs: Sequence[Callable[[], object]], turns: int = TURNS) -> list[float]:
    """The least seconds of each, in turns: what disturbs one turn does not disturb all."""
    least = [float("inf")] * len(runs)
    for _ in range(turns):
        for i, run in enumerate(runs):
            begun = time.perf_counter()
            run()
            least[i] = min(least[i], time.perf_counter() - begun)
    return least


def _peak(dtype: torch.dtype) -> float:
    """Operations per second of the library's product of large matrices."""
    x, w = (torch.randn(1024, 1024).to(dtype) for _ in range(2))
    return float(2 * 1024**3 / _times([lambda: F.linear(x, w)])[0])


def _read_speed() -> float:
    """Bytes per second of reading what no cache holds."""
    return float(BYTES_AT_ONCE / _times([_reader(BYTES_AT_ONCE)])[0])


def _reader(size: int) -> Callable[[], object]:
    data = torch.ones(size // 8, dtype=torch.int64)
    return data.sum


def _product(dtype: torch.dtype, m: int, n: int, k: int, threads: int, peak: float) -> Row:
    kernels, code = native.library(), int(dtype is torch.bfloat16)
    size = n * k * dtype.itemsize
    copies = max(2, BYTES_AT_ONCE // size) if m < 32 else 2
    weights = [torch.randn(n, k).to(dtype) for _ in range(copies)]
    packed = [_packed(w, code) for w in weights]
    x = torch.randn(m, k).to(dtype)
    acts, out = torch.zeros(-(-m // 32) * 32 * k), torch.empty(m, n)
    kernels.acts(code, m, k, _at(x.float().contiguous()), _at(acts))

    def ours() -> None:
        for _, linear in packed:
            kernels.product(code, m, _at(acts), ctypes.byref(linear), _at(out), threads)

    def theirs() -> None:
        for w in weights:
            F.linear(x, w)

    own, rival, read = _times([ours, theirs, _reader(size * copies)])
    flops = 2 * m * n * k * copies
    return {
        "kernel": "product",
        "dtype": str(dtype).removeprefix("torch."),
        "m": m,
        "n": n,
        "k": k,
        "gigabytes_per_sec": round(size * copies / own / 1e9, 2),
        "gigaflops": round(flops / own / 1e9, 1),
        "of_read_speed": round(read / own, 3),
        "of_roofline": round(max(read, flops / peak) / own, 3),
        "over_torch_linear": round(rival / own, 3),
    }


def _packed(weight: Tensor, code: int) -> tuple[Tensor, Any]:
    from specbatch.kernels.decoder.cpu import _Linear

    kernels, (n, k) = native.library(), weight.shape
    panel = kernels.panel()
    packed = torch.empty(-(-n // panel) * panel * k, dtype=weight.dtype)
    kernels.pack(code, _at(weight), n, k, _at(packed))
    return packed, _Linear(packed.data_ptr(), None, n, k)


def _at(tensor: Tensor) -> int:
    return tensor.data_ptr()


def _step(
    name: str, shape: DecoderShape, dtype: torch.dtype, n: int, speed: float, peak: float
) -> list[Row]:
    """A decoding step of n sequences, by kernel, and its rows sampled."""
    decoder = Decoder(shape, _weights(shape, dtype), n * CONTEXT // BLOCK_SIZE, consume=True)
    batch = _batch(n)
    decoder.seconds = np.zeros(len(PHASES))
    # As flat as a vocabulary's logits get: many tokens are in a nucleus.
    logits = 2 * torch.randn(n, shape.vocab)
    best = np.full(len(PHASES), np.inf)
    for _ in range(TURNS):
        decoder.seconds[:] = 0
        decoder.forward(batch)
        best = np.minimum(best, decoder.seconds)
    sampling = [_sampling(logits, temperature) for temperature in (0.0, 0.8)]
    taken = dict(zip(PHASES, best.tolist(), strict=True))
    taken |= dict(zip(("sampling-greedy", "sampling-top-p"), _times(sampling), strict=True))
    least = _least(shape, dtype.itemsize, n, speed, peak)
    whole = sum(best)
    return [
        {
            "kernel": kernel,
            "model": name,
            "dtype": str(dtype).removeprefix("torch."),
            "sequences": n,
            "milliseconds": round(seconds * 1e3, 4),
            "share_of_pass": round(seconds / whole, 3),
            "of_roofline": round(least[kernel] / seconds, 3),
        }
        for kernel, seconds in taken.items()
    ]


def _least(s: DecoderShape, item: int, n: int, speed: float, peak: float) -> dict[str, float]:
    """Seconds that each kernel's bytes or operations take at least, in one step."""

    def roof(size: float, flops: float) -> float:
        return max(size / speed, flops / peak)

    wide, kv = s.heads * s.head_dim, 2 * s.kv_heads * s.head_dim
    weights = s.layers * (s.hidden * (2 * wide + kv) + 3 * s.hidden * s.inter)
    head = s.vocab * s.hidden
    logits = n * s.vocab * 4
    return {
        "norms": roof(n * s.hidden * 8 * (2 * s.layers + 1), n * s.hidden * 4 * (2 * s.layers + 1)),
        "products": roof(weights * item, 2 * n * weights),
        "placing": roof(n * s.layers * (wide + kv) * 8, n * s.layers * (wide + kv) * 3),
        "attention": roof(n * s.layers * CONTEXT * kv * item, n * s.layers * CONTEXT * wide * 4),
        "head": roof(head * item + logits, 2 * n * head),
        "sampling-greedy": logits / speed,
        "sampling-top-p": logits / speed,
    }


def _weights(s: DecoderShape, dtype: torch.dtype) -> DecoderWeights:
    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape) * 0.02).to(dtype)

    wide, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    layers = tuple(
        LayerWeights(
            torch.ones(s.hidden),
            torch.ones(s.hidden),
            random(wide, s.hidden),
            random(kv, s.hidden),
            random(kv, s.hidden),
            random(s.hidden, wide),
            random(s.inter, s.hidden),
            random(s.inter, s.hidden),
            random(s.hidden, s.inter),
        )
        for _ in range(s.layers)
    )
    embedding, table = random(s.vocab, s.hidden), torch.ones(CONTEXT, s.head_dim)
    return DecoderWeights(embedding, embedding, torch.ones(s.hidden), table, table, layers)


def _batch(n: int) -> DecoderBatch:
    """The last of `CONTEXT` tokens of n sequences."""
    blocks = CONTEXT // BLOCK_SIZE
    tables = [list(range(i * blocks, (i + 1) * blocks)) for i in range(n)]
    slots = torch.tensor([table[-1] * BLOCK_SIZE + BLOCK_SIZE - 1 for table in tables])
    ragged = RaggedBatch(list(range(n + 1)), [CONTEXT] * n, tables, slots)
    return DecoderBatch(
        torch.arange(n) % 100, torch.full((n,), CONTEXT - 1), ragged, torch.arange(n)
    )


def _sampling(logits: Tensor, temperature: float) -> Callable[[], object]:
    rows = logits.shape[0]
    params = SamplingRows(
        temperature=torch.full((rows,), temperature),
        top_k=torch.zeros(rows, dtype=torch.int64),
        top_p=torch.full((rows,), 0.95 if temperature else 1.0),
        min_p=torch.zeros(rows),
        forbidden_rows=torch.empty(0, dtype=torch.int64),
        forbidden_tokens=torch.empty(0, dtype=torch.int64),
        any_sampled=temperature > 0,
        any_top_k=False,
        any_top_p=temperature > 0,
        any_min_p=False,
    )
    counters = torch.stack((torch.arange(rows), torch.arange(rows)), 1)
    drafts, offsets = torch.full((rows,), -1), torch.arange(rows + 1)
    return lambda: verify.verify(logits, drafts, offsets, counters, params)


if __name__ == "__main__":
    main()
