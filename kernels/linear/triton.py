"""A linear layer in Triton whose rows have the same bits at any number of rows.

    R  rows of a tile (64)      C  columns of a tile (64)      K  inputs taken at a time (64)

Libraries choose another kernel, and another order of addition, for another number of rows. Here
every program multiplies one [R, K] · [K, C] tile after the other, from the first input to the last,
and no program shares a sum with another: there is no split over inputs and nothing is tuned to the
number of rows. Missing rows are zeros; a product's row does not read its neighbours. A pass of few
rows is bound by reading the weights, which rows of zeros do not change.
So far run through Triton's interpreter only: it compiles for a GPU but has run on none, and the
sizes of its tiles are a guess.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64  # the least of a warp group's product
COLUMNS = 64
INPUTS = 64


def linear(
    x: Tensor,  # [..., inputs]
    weight: Tensor,  # [outputs, inputs], of x's dtype
    bias: Tensor | None = None,  # [outputs]
) -> Tensor:
    """As `reference.linear`, up to the order of addition."""
    outputs, inputs = weight.shape
    rows = x.reshape(-1, inputs).contiguous()
    out = torch.empty(rows.shape[0], outputs, dtype=x.dtype, device=x.device)
    if out.numel():
        # Tiles of rows run fastest, so that programs at work together share their weights.
        _multiply[(triton.cdiv(rows.shape[0], ROWS), triton.cdiv(outputs, COLUMNS))](
            rows,
            weight.contiguous(),
            weight if bias is None else bias,
            out,
            rows.shape[0],
            outputs,
            inputs=inputs,
            has_bias=bias is not None,
            precision="ieee" if x.dtype == torch.float32 else "tf32",
            widen=bool(triton.knobs.runtime.interpret) and x.dtype == torch.bfloat16,
            tile_rows=ROWS,
            tile_columns=COLUMNS,
            tile_inputs=INPUTS,
        )
    return out.view(*x.shape[:-1], outputs)


@triton.jit
def _multiply(
    x,  # [rows, inputs]
    weight,  # [outputs, inputs]
    bias,  # [outputs]; read only if `has_bias`
    out,  # [rows, outputs]
    rows,
    outputs,
    inputs: tl.constexpr,
    has_bias: tl.constexpr,
    precision: tl.constexpr,  # of float32 products; those of 16 bits are exact
    widen: tl.constexpr,  # the interpreter takes bfloat16's bits for whole numbers
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_inputs: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1).to(tl.int64) * tile_columns + tl.arange(0, tile_columns)
    total = tl.zeros([tile_rows, tile_columns], tl.float32)
    for begin in range(0, inputs, tile_inputs):
        k = begin + tl.arange(0, tile_inputs)
        left = tl.load(
            x + row[:, None] * inputs + k[None, :],
            mask=(row < rows)[:, None] & (k < inputs)[None, :],
            other=0.0,
        )
        right = tl.load(
            weight + column[None, :] * inputs + k[:, None],
            mask=(column < outputs)[None, :] & (k < inputs)[:, None],
            other=0.0,
        )
        if widen:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision=precision)
    if has_bias:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row[:, None] * outputs + column[None, :],
        total.to(out.dtype.element_ty),
        mask=(row < rows)[:, None] & (column < outputs)[None, :],
    )
