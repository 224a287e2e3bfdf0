"""Verification in Triton: noise, argmax and log-sum-exp in one pass over the logits.

Greedy rows and plain temperature read each logit once and write a few numbers per tile of tokens;
a second, small kernel joins a row's tiles in their order. Tiles have a fixed size, so that a row's
bits do not depend on its batch. Forbidden tokens, masks, top-k, top-p and min-p are processed by
the torch definition first; the same pass then reads the processed scores beside the logits. Only
the running sum of top-p is our own there: torch's takes another order on a GPU for another number
of rows. The most likely tokens are found by the definition's sort, of the rows that want them.
So far run through Triton's interpreter only: they compile for a GPU but have run on none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbatch.kernels.counters.triton import gumbel_tile
from specbatch.kernels.verify.contract import SamplingRows, Verdict
from specbatch.kernels.verify.reference import match_prefix, process, top_tokens

TILE = 1024  # tokens per program

_MIN_TEMPERATURE = tl.constexpr(1e-6)
_MINUS_INF = tl.constexpr(float("-inf"))


def verify(
    target_logits: Tensor,  # [num_rows, vocab_size] float32, unprocessed
    draft_tokens: Tensor,  # [num_rows] int64; PLACEHOLDER on each bonus row
    row_offsets: Tensor,  # [num_seqs + 1] int64, rows of sequence i
    counters: Tensor,  # [num_rows, 2] int64: (request key, position)
    sampling: SamplingRows,
) -> Verdict:
    """As `reference.verify`; log-probabilities up to rounding. Never synchronises with the host."""
    logprobs = target_logits.new_empty(target_logits.shape[0], dtype=torch.float32)
    norm = torch.empty_like(logprobs)
    tokens = _sample(target_logits, counters, sampling, (logprobs, norm))
    top = top_tokens(target_logits, norm, sampling.top)
    return Verdict(tokens, logprobs, match_prefix(tokens, draft_tokens, row_offsets), top)


def sample(
    logits: Tensor,  # [num_rows, vocab_size] float32, unprocessed
    counters: Tensor,  # [num_rows, 2] int64
    sampling: SamplingRows,
) -> Tensor:
    """As `reference.sample`."""
    return _sample(logits, counters, sampling, None)


def running_sum(x: Tensor) -> Tensor:
    """As `reference.running_sum`, of rows without negative numbers, up to rounding."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _add_up[(x.shape[0],)](x, out, x.shape[1], TILE)
    return out


def _sample(
    logits: Tensor,
    counters: Tensor,
    sampling: SamplingRows,
    probability: tuple[Tensor, Tensor] | None,  # logprobs and log-sum-exp, [num_rows] each: filled
) -> Tensor:
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return tokens
    logits = logits.contiguous()
    filters = sampling.any_top_k or sampling.any_top_p or sampling.any_min_p
    filtered = (
        sampling.adjust is not None
        or sampling.forbidden_rows.numel() > 0
        or sampling.allowed is not None
        or (sampling.any_sampled and filters)
    )
    scores = process(logits, sampling, running_sum).contiguous() if filtered else logits
    tiles = triton.cdiv(vocab_size, TILE)
    numbers = logits.new_empty(3, num_rows, tiles, dtype=torch.float32)
    candidates = torch.empty(num_rows, tiles, dtype=torch.int32, device=logits.device)
    _search_tile[(num_rows, tiles)](
        logits,
        scores,
        counters.contiguous(),
        sampling.temperature.contiguous(),
        *numbers,
        candidates,
        vocab_size,
        filtered=filtered,
        sampled=sampling.any_sampled,
        with_sum=probability is not None,
        tile=TILE,
        enable_fp_fusion=False,
    )
    _join_tiles[(num_rows,)](
        logits,
        *numbers,
        candidates,
        tokens,
        *((tokens, tokens) if probability is None else probability),
        vocab_size,
        tiles,
        with_sum=probability is not None,
        width=triton.next_power_of_2(tiles),
        enable_fp_fusion=False,
    )
    return tokens


@triton.jit
def _add_up(x, out, width, tile: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    before = 0.0
    for begin in range(0, width, tile):
        at = begin + tl.arange(0, tile)
        part = tl.load(x + row + at, mask=at < width, other=0.0)
        sums = tl.cumsum(part, axis=0) + before
        tl.store(out + row + at, sums, mask=at < width)
        before = tl.max(sums, axis=0)  # the last of them: nothing is negative


@triton.jit
def _search_tile(
    logits,  # [num_rows, vocab_size]
    scores,  # [num_rows, vocab_size], processed; read only if `filtered`
    counters,  # [num_rows, 2]
    temperatures,  # [num_rows]
    bests,  # [num_rows, tiles]: highest score with noise
    peaks,  # [num_rows, tiles]: highest logit
    sums,  # [num_rows, tiles]: of exp(logit - peak)
    candidates,  # [num_rows, tiles]: the first token with the highest score
    vocab_size,
    filtered: tl.constexpr,
    sampled: tl.constexpr,
    with_sum: tl.constexpr,
    tile: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = part * tile + tl.arange(0, tile)
    inside = tokens < vocab_size
    at = row * tl.num_programs(1) + part

    x = tl.load(logits + row * vocab_size + tokens, mask=inside, other=_MINUS_INF)

    # 1) The row's scores, with noise if it is sampled, and the best of them.
    z = x
    if filtered:
        z = tl.load(scores + row * vocab_size + tokens, mask=inside, other=_MINUS_INF)
    if sampled:
        temperature = tl.load(temperatures + row)
        if temperature > 0:
            if not filtered:
                # Rounded as torch divides; `/` would be an approximation.
                z = tl.div_rn(z, tl.maximum(temperature, _MIN_TEMPERATURE))
            z = z + gumbel_tile(counters + 2 * row, part * tile, 0, tile)
    z = tl.where(z == z, z, _MINUS_INF)  # NaN wins nothing: the log-probability tells of it
    best, candidate = tl.max(z, axis=0, return_indices=True)
    tl.store(bests + at, best)
    tl.store(candidates + at, part * tile + candidate)

    # 2) The tile's share of the log-sum-exp of the logits as they came.
    if with_sum:
        peak = tl.max(tl.where(x == x, x, _MINUS_INF), axis=0)
        tl.store(peaks + at, peak)
        tl.store(sums + at, tl.sum(tl.exp(x - _finite(peak)), axis=0))


@triton.jit
def _finite(peak):
    """0 for the peak of nothing, so that exp(-inf - peak) is 0 and not NaN."""
    return tl.where(peak == _MINUS_INF, 0.0, peak)


@triton.jit
def _join_tiles(
    logits,  # [num_rows, vocab_size]
    bests,  # [num_rows, tiles], and so the next three
    peaks,
    sums,
    candidates,
    tokens,  # [num_rows]
    logprobs,  # [num_rows]
    norms,  # [num_rows]
    vocab_size,
    tiles,
    with_sum: tl.constexpr,
    width: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, width)
    at, inside = row * tiles + parts, parts < tiles
    score = tl.load(bests + at, mask=inside, other=_MINUS_INF)
    winner = tl.argmax(score, axis=0)
    token = tl.load(candidates + row * tiles + winner)
    tl.store(tokens + row, token)
    if with_sum:
        peak = tl.load(peaks + at, mask=inside, other=_MINUS_INF)
        total = tl.load(sums + at, mask=inside, other=0.0)
        top = tl.max(peak, axis=0)
        total = tl.sum(total * tl.exp(peak - _finite(top)), axis=0)
        chosen = tl.load(logits + row * vocab_size + token)
        norm = top + tl.log(total)
        tl.store(norms + row, norm)
        nothing_left = tl.max(score, axis=0) == _MINUS_INF
        tl.store(logprobs + row, tl.where(nothing_left, float("nan"), chosen - norm))
