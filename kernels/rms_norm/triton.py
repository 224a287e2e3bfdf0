"""Root-mean-square norm in Triton: one program per row, and so the same bits in any company.

torch's mean on a GPU shares a block of threads among as many rows as there are: one row is added up
by 512 threads, each of sixteen rows by 32, in another order. Here a row is always added up alike.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(
    x: Tensor,  # [..., width]
    weight: Tensor,  # [width]
    eps: float,
    offset: float = 0.0,  # added to the weight: 1 for Gemma
    round_first: bool = True,  # round to x's dtype before the weight, as Llama does, or after it
) -> Tensor:
    """As `reference.rms_norm`, up to the order of addition."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    if x.numel():
        _normalise[(x.numel() // width,)](
            x,
            weight.contiguous(),
            out,
            eps,
            offset,
            width=width,
            round_first=round_first,
            columns=triton.next_power_of_2(width),
            enable_fp_fusion=True,  # said, so that a new default changes no bits
        )
    return out


@triton.jit
def _normalise(
    x,  # [rows, width]
    weight,  # [width]
    out,  # [rows, width]
    eps,
    offset,
    width: tl.constexpr,
    round_first: tl.constexpr,
    columns: tl.constexpr,  # at least width
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, columns)
    inside = column < width
    values = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
    if round_first:
        normed = normed.to(out.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
    scaled = (normed * factor).to(out.dtype.element_ty)
    tl.store(out + row * width + column, scaled, mask=inside)
