"""Philox4x32-10 and Gumbel noise in plain torch: the definition.

    key      the request's seed, 64 bits as two words
    counter  (token id // 4, position, stream, 0); word `token id % 4` of the output is the token's

Philox is Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC'11). The
Gumbel variate of a 32-bit word x is -log(-log(1 - u)) with u = (x + 1/2) / 2**32. Both logarithms
are the Cephes polynomial in separately rounded float32 additions and multiplications, so that any
implementation without fused multiply-add gives the same bits, which library logarithms do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
ROUNDS = 10

# log(1 + f) = f - f²/2 + f³ P(f) for sqrt(1/2) <= 1 + f < sqrt(2)  (Cephes logf.c)
_P = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_SQRT_HALF_BITS = 0x3F3504F3


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor],  # 4 × [...] int64, words in [0, 2**32)
    key: tuple[Tensor, Tensor],  # 2 × broadcastable int64, words in [0, 2**32)
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words per counter, as int64 tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The 64-bit product wraps in int64 but keeps all of its bits.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def random_words(
    counters: Tensor,  # [num_rows, 2] int64: (request key, position)
    vocab_size: int,
    stream: int = 0,
) -> Tensor:
    """The 32-bit word of every (row, token id), as int64 [num_rows, vocab_size]."""
    keys, positions = counters[:, 0:1], counters[:, 1:2]
    quads = torch.arange((vocab_size + 3) // 4, device=counters.device)[None, :]
    zero = torch.zeros_like(quads)
    words = philox4x32(
        (quads, positions & _MASK, zero + stream, zero), (keys & _MASK, (keys >> 32) & _MASK)
    )
    return torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]


def gumbel(
    counters: Tensor,  # [num_rows, 2] int64: (request key, position)
    vocab_size: int,
    stream: int = 0,
) -> Tensor:
    """Standard Gumbel noise, float32 [num_rows, vocab_size]; a pure function of its arguments.

    Streams other than 0 are independent of it: a ratio test must not reuse a draft's noise.
    """
    return -_log(exponential(random_words(counters, vocab_size, stream)))


def exponential(words: Tensor) -> Tensor:
    """-log(1 - u) of 32-bit words, float32. Small u keep their precision: the tail is exact."""
    u = (2 * words + 1).to(torch.float32) * 2.0**-33
    one_minus_u = (2 * (_MASK - words) + 1).to(torch.float32) * 2.0**-33
    near_zero = words < 2**30
    return -torch.where(near_zero, _log1p(-u), _log(one_minus_u))


def _log1p(f: Tensor) -> Tensor:
    """log(1 + f) for -0.2929 <= f < 0.4143."""
    return f + _tail(f, f * f)


def _tail(f: Tensor, z: Tensor) -> Tensor:
    p = torch.full_like(f, _P[0])
    for coefficient in _P[1:]:
        p = p * f + coefficient
    return (p * f) * z - 0.5 * z


def _log(x: Tensor) -> Tensor:
    """Natural logarithm of normal positive float32."""
    bits = x.view(torch.int32)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).view(torch.float32) - 1.0
    e = exponent.to(torch.float32)
    return (f + (_tail(f, f * f) + e * _LN2_LOW)) + e * _LN2_HIGH
