"""A linear layer in Triton whose rows have the same bits at any number of rows.

Libraries choose another kernel, and another order of addition, for another number of rows. Here
every program multiplies one [rows, K] · [K, columns] tile after the other, from the first input to
the last, and no program shares a sum with another: there is no split over inputs. Missing rows are
zeros; a product's row does not read its neighbours.

Tensor cores add a row's products in one order whatever the tile: on an H200 all twenty tiles that
were tried gave every row the same bits, so the tile may follow the number of rows. No vendor
promises that. Whoever needs it probes it (`exactness: bitwise` does, for each layer), and takes the
one tile `CONSTANT` where it does not hold.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """What one program computes, and how."""

    rows: int
    columns: int
    inputs: int  # taken at a time
    warps: int = 4
    stages: int = 3


CONSTANT = Tile(64, 64, 64)  # for any number of rows
# The fastest of 20 on an H200 for products of 16 bits; the larger, the fewer bytes are read twice.
_UP_TO_16_ROWS = (Tile(16, 64, 128, 4, 4), Tile(16, 32, 256, 4, 3))
_UP_TO_64_ROWS = (Tile(64, 128, 128, 4, 3), Tile(64, 32, 128, 4, 4))
_MORE_ROWS = (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 4), *_UP_TO_64_ROWS)
TILES = (*_UP_TO_16_ROWS, *_MORE_ROWS)
_BUSY_PROGRAMS = 96  # most of the multiprocessors of a large GPU
SHARED_BYTES_OF_TILES = 160 << 10  # at most, of a program


def tile_of(rows: int, outputs: int) -> Tile:
    """The largest tile that still makes programs for most of the GPU."""
    tiles: tuple[Tile, ...] = _MORE_ROWS
    if rows <= 64:
        tiles = _UP_TO_16_ROWS if rows <= 16 else _UP_TO_64_ROWS
    for tile in tiles:
        if triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.columns) >= _BUSY_PROGRAMS:
            return tile
    return tiles[-1]


def may_choose(x: Tensor) -> bool:
    """Whether tiles other than `CONSTANT` are for products of this dtype on this device."""
    # The interpreter's products depend on their shape, and float32 has no tensor cores.
    return x.device.type == "cuda" and x.dtype != torch.float32 and _has_room(x.device)


@lru_cache(maxsize=16)
def _has_room(device: torch.device) -> bool:
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin) >= SHARED_BYTES_OF_TILES


def linear(
    x: Tensor,  # [..., inputs]
    weight: Tensor,  # [outputs, inputs], of x's dtype
    bias: Tensor | None = None,  # [outputs]
) -> Tensor:
    """As `reference.linear`, up to the order of addition."""
    return linear_in_tiles(x, weight, bias, None)


def linear_in_tiles(
    x: Tensor,  # [..., inputs]
    weight: Tensor,  # [outputs, inputs], of x's dtype
    bias: Tensor | None,  # [outputs]
    tile: Tile | None,
) -> Tensor:
    """`linear` in this tile, at any number of rows; without one, products of 16 bits take the best
    for their number."""
    outputs, inputs = weight.shape
    rows = x.reshape(-1, inputs).contiguous()
    count = rows.shape[0]
    out = torch.empty(count, outputs, dtype=x.dtype, device=x.device)
    if out.numel():
        if tile is None:
            tile = tile_of(count, outputs) if may_choose(x) else CONSTANT
        # Tiles of rows run fastest, so that programs at work together share their weights.
        _multiply[(triton.cdiv(count, tile.rows), triton.cdiv(outputs, tile.columns))](
            rows,
            weight.contiguous(),
            weight if bias is None else bias,
            out,
            count,
            outputs,
            inputs=inputs,
            has_bias=bias is not None,
            precision="ieee" if x.dtype == torch.float32 else "tf32",
            widen=bool(triton.knobs.runtime.interpret) and x.dtype == torch.bfloat16,
            tile_rows=tile.rows,
            tile_columns=tile.columns,
            tile_inputs=tile.inputs,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=True,
        )
    return out.view(*x.shape[:-1], outputs)


@triton.jit(do_not_specialize=["rows"])  # any number is one kernel
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
