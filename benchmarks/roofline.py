"""What a kernel moves and computes, and how near it comes to what the device can do.

Bytes are the least there is to move: each operand once. Roofs are measured, not taken from a data
sheet: a large copy for bandwidth, a large product for arithmetic.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.kernels.linear import triton as linear_kernel
from specbatch.kernels.paged_attention import triton as attention_kernel
from specbatch.kernels.paged_attention.contract import RaggedBatch
from specbatch.kernels.rms_norm import triton as norm_kernel
from specbatch.kernels.verify import triton as verify_kernel
from specbatch.kernels.verify.contract import PLACEHOLDER, SamplingRows

BLOCK = 32
Seconds = Callable[[Callable[[], object]], float]


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel at one size; `rival` does the same by torch's own means, where there is one."""

    kernel: str
    shape: dict[str, Any]
    run: Callable[[], object]
    bytes_moved: int
    flops: int
    rival: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True)
class Roofs:
    """What the device was seen to do."""

    bytes_per_sec: float
    flops_per_sec: float


def cuda_seconds(run: Callable[[], object], runs: int = 25) -> float:
    """Median time on the GPU, from cold caches."""
    cold = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    taken: list[float] = []
    for i in range(runs + 3):
        cold.zero_()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        run()
        ended.record()
        ended.synchronize()
        if i >= 3:  # the first ones compile and warm up
            taken.append(begun.elapsed_time(ended) / 1000)
    return statistics.median(taken)


def roofs(seconds: Seconds, device: str, size: int = 8192, copied: int = 4 << 30) -> Roofs:
    """Measure them."""
    source = torch.empty(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = seconds(lambda: target.copy_(source))
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    multiplying = seconds(lambda: left @ right)
    return Roofs(2 * copied / copying, 2 * size**3 / multiplying)


def measured(work: Work, seconds: Seconds, limits: Roofs) -> dict[str, Any]:
    """A row of figures; `of_roof` is the time that the nearer roof allows over the time taken."""
    took = seconds(work.run)
    least = max(work.bytes_moved / limits.bytes_per_sec, work.flops / limits.flops_per_sec)
    row = {
        "kernel": work.kernel,
        **work.shape,
        "seconds": took,
        "gb_per_sec": round(work.bytes_moved / took / 1e9, 1),
        "tflops": round(work.flops / took / 1e12, 2),
        "of_roof": round(least / took, 4),
    }
    if work.rival is not None:
        row["torch_seconds"] = seconds(work.rival)
    return row


def all_work(device: str, small: bool = False) -> Iterator[Work]:
    """Sizes of a model of some billion parameters; `small` only to see that all of it runs."""
    if small:
        yield linear_work(3, 32, 48, device)
        yield norm_work(3, 48, device)
        yield attention_work(2, 3, 40, 4, 2, 32, device)
        yield from (verify_work(3, 111, t, device) for t in (0.0, 0.7))
        return
    for rows in (1, 16, 64, 256, 2048):
        for inputs, outputs in ((4096, 4096), (4096, 14336), (14336, 4096), (4096, 128256)):
            yield linear_work(rows, inputs, outputs, device)
        yield norm_work(rows, 4096, device)
    for sequences, queries, context in (
        (1, 1, 2048), (64, 1, 512), (64, 1, 4096), (64, 5, 4096), (256, 1, 1024), (1, 2048, 2048),
    ):  # fmt: skip
        yield attention_work(sequences, queries, context, 32, 8, 128, device)
    for rows in (1, 64, 512):
        for temperature in (0.0, 0.7):
            yield verify_work(rows, 128256, temperature, device)


def linear_work(rows: int, inputs: int, outputs: int, device: str) -> Work:
    """bfloat16."""
    x, weight = (
        torch.randn(n, inputs, dtype=torch.bfloat16, device=device) for n in (rows, outputs)
    )
    return Work(
        "linear",
        {"rows": rows, "inputs": inputs, "outputs": outputs},
        lambda: linear_kernel.linear(x, weight),
        2 * (rows * inputs + inputs * outputs + rows * outputs),
        2 * rows * inputs * outputs,
        lambda: F.linear(x, weight),
    )


def norm_work(rows: int, width: int, device: str) -> Work:
    """bfloat16."""
    x = torch.randn(rows, width, dtype=torch.bfloat16, device=device)
    weight = torch.ones(width, dtype=torch.bfloat16, device=device)
    return Work(
        "rms_norm",
        {"rows": rows, "width": width},
        lambda: norm_kernel.rms_norm(x, weight, 1e-6),
        2 * (2 * rows * width + width),
        4 * rows * width,
        lambda: F.rms_norm(x, (width,), weight, 1e-6),
    )


def attention_work(
    sequences: int,
    queries: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    device: str,
) -> Work:
    """bfloat16; every sequence has its own blocks, in no order."""
    per_sequence = -(-context // BLOCK)
    order = (torch.randperm(sequences * per_sequence) + 1).tolist()
    shape = (len(order) + 1, BLOCK, kv_heads, head_dim)
    keys, values = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    tokens = sequences * queries
    query = torch.randn(tokens, heads, head_dim, dtype=torch.bfloat16, device=device)
    batch = RaggedBatch(
        [i * queries for i in range(sequences + 1)],
        [context] * sequences,
        [order[i * per_sequence : (i + 1) * per_sequence] for i in range(sequences)],
        torch.zeros(tokens, dtype=torch.int64, device=device),
    )

    def run() -> Tensor:  # index work is shared by the layers of a pass, so it is done once
        return attention_kernel.paged_attention(query, keys, values, batch, head_dim**-0.5)

    seen = sum(context - queries + 1 + i for i in range(queries))
    return Work(
        "paged_attention",
        {"sequences": sequences, "queries": queries, "context": context, "heads": heads},
        run,
        2 * (2 * tokens * heads * head_dim + 2 * sequences * context * kv_heads * head_dim),
        4 * sequences * seen * heads * head_dim,
    )


def without_filters(rows: int, temperature: float, device: str = "cpu") -> SamplingRows:
    none = torch.empty(0, dtype=torch.int64, device=device)
    return SamplingRows(
        temperature=torch.full((rows,), temperature, device=device),
        top_k=torch.zeros(rows, dtype=torch.int64, device=device),
        top_p=torch.ones(rows, device=device),
        min_p=torch.zeros(rows, device=device),
        forbidden_rows=none,
        forbidden_tokens=none,
        any_sampled=temperature > 0,
        any_top_k=False,
        any_top_p=False,
        any_min_p=False,
    )


def verify_work(rows: int, vocab: int, temperature: float, device: str) -> Work:
    """float32 logits; greedy or sampled, without filters."""
    logits = torch.randn(rows, vocab, device=device)
    sampling = without_filters(rows, temperature, device)
    draft = torch.full((rows,), PLACEHOLDER, device=device)
    offsets = torch.arange(rows + 1, device=device)
    counters = torch.arange(2 * rows, device=device).view(rows, 2)
    return Work(
        "verify",
        {"rows": rows, "vocab": vocab, "temperature": temperature},
        lambda: verify_kernel.verify(logits, draft, offsets, counters, sampling),
        4 * rows * vocab,
        0,  # integers, mostly
    )
