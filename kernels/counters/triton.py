"""Gumbel noise in Triton, with the bits of `reference`.

Every kernel that inlines `gumbel_tile` is launched with `enable_fp_fusion=False`: a fused
multiply-add would round once where the definition rounds twice.
So far run through Triton's interpreter only: they compile for a GPU but have run on none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # tokens per program

_M0, _M1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
_W0, _W1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)
_ALL_ONES = tl.constexpr(0xFFFFFFFF)
_QUARTER = tl.constexpr(2**30)
_TO_UNIT = tl.constexpr(2.0**-33)
_LN2_HIGH, _LN2_LOW = tl.constexpr(0.693359375), tl.constexpr(-2.12194440e-4)
_SQRT_HALF_BITS = tl.constexpr(0x3F3504F3)


def gumbel(
    counters: Tensor,  # [num_rows, 2] int64: (request key, position)
    vocab_size: int,
    stream: int = 0,
) -> Tensor:
    """As `reference.gumbel`."""
    num_rows = counters.shape[0]
    out = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=counters.device)
    if out.numel():
        grid = (num_rows, triton.cdiv(vocab_size, TILE))
        _gumbel[grid](counters.contiguous(), out, vocab_size, stream, TILE, enable_fp_fusion=False)
    return out


@triton.jit
def _gumbel(counters, out, vocab_size, stream: tl.constexpr, tile: tl.constexpr):
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * tile
    noise = gumbel_tile(counters + 2 * row, first, stream, tile)
    tokens = first + tl.arange(0, tile)
    tl.store(out + row * vocab_size + tokens, noise, mask=tokens < vocab_size)


@triton.jit
def gumbel_tile(counter, first, stream: tl.constexpr, tile: tl.constexpr):
    """Noise of `tile` tokens from `first`, a multiple of 4; `counter` points to its row's pair."""
    key, position = tl.load(counter), tl.load(counter + 1)
    quads = (first // 4 + tl.arange(0, tile // 4)).to(tl.uint32)
    w0, w1, w2, w3 = _philox4x32(
        quads,
        tl.full([tile // 4], 0, tl.uint32) + position.to(tl.uint32),
        tl.full([tile // 4], stream, tl.uint32),
        tl.full([tile // 4], 0, tl.uint32),
        key.to(tl.uint32),
        (key >> 32).to(tl.uint32),
    )
    # w0[0], w1[0], w2[0], w3[0], w0[1], ...: word `token % 4` of quad `token // 4`.
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return -_log(_exponential(words))


@triton.jit
def _philox4x32(c0, c1, c2, c3, k0, k1):
    for _ in tl.static_range(10):
        h0, h1 = tl.umulhi(c0, _M0), tl.umulhi(c2, _M1)
        l0, l1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = k0 + _W0, k1 + _W1
    return c0, c1, c2, c3


@triton.jit
def _exponential(words):
    u = _unit(words)
    return -tl.where(words < _QUARTER, _log1p(-u), _log(_unit(words ^ _ALL_ONES)))


@triton.jit
def _unit(words):
    return (words.to(tl.uint64) * 2 + 1).to(tl.float32) * _TO_UNIT


@triton.jit
def _log1p(f):
    return f + _tail(f, f * f)


@triton.jit
def _log(x):
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    e = exponent.to(tl.float32)
    return (f + (_tail(f, f * f) + e * _LN2_LOW)) + e * _LN2_HIGH


@triton.jit
def _tail(f, z):
    p = f * 7.0376836292e-2 + -1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f + -1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f + -1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f + -2.4999993993e-1
    p = p * f + 3.3333331174e-1
    return (p * f) * z - z * 0.5
