"""Tiles: what is padded to them holds, and a row's bits do not depend on its company."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from specbatch.pipeline.engines.exact.model.batch_invariant import row_tiles
from specbatch.pipeline.engines.exact.model.batch_invariant.row_tiles import (
    LADDER,
    RowTiles,
    TiledLinear,
    calibrate,
)

SIZES = [(8,), (512,), (8, 64), (8, 16, 48), (32, 128, 512), (16, 96, 384), LADDER]
SHAPES = [(32, 32), (32, 300), (64, 111), (96, 7)]


def linear(inputs: int, outputs: int, dtype: torch.dtype, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_cover_holds_all_rows_and_no_tile_too_many(sizes: tuple[int, ...]) -> None:
    tiles = RowTiles(sizes)
    for rows in [*range(1, 300), 511, 512, 513, 1000, 2048, 2049]:
        cover = tiles.cover(rows)
        assert set(cover) <= set(sizes)
        assert list(cover) == sorted(cover, reverse=True)
        assert sum(cover) >= rows
        assert sum(cover) - min(cover) < rows
    assert tiles.cover(0) == ()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_what_is_padded_needs_no_more_padding(sizes: tuple[int, ...]) -> None:
    tiles = RowTiles(sizes)
    for rows in range(1, 1100):
        padded = tiles.padded(rows)
        assert tiles.padded(padded) == padded >= rows


@pytest.mark.parametrize(
    ("sizes", "rows", "cover"),
    [
        ((8,), 17, (8, 8, 8)),
        ((8, 64), 8, (8,)),
        ((8, 64), 9, (8, 8)),  # two small calls before one large
        ((8, 64), 40, (64,)),  # and the other way round
        ((8, 64), 72, (64, 8)),
        ((512,), 1, (512,)),
        (LADDER, 40, (48,)),
        (LADDER, 1024, (512, 512)),
    ],
)
def test_examples_of_covers(sizes: tuple[int, ...], rows: int, cover: tuple[int, ...]) -> None:
    assert RowTiles(sizes).cover(rows) == cover


def test_no_other_tiles_are_cheaper() -> None:
    """A call costs as much as 24 rows; all multisets of tiles are tried."""
    sizes = (8, 16, 48, 64)
    for rows in range(1, 130):
        cover = RowTiles(sizes).cover(rows)
        cheapest = min(
            24 * count + sum(tiles)
            for count in range(1, 7)
            for tiles in itertools.combinations_with_replacement(sizes, count)
            if sum(tiles) >= rows
        )
        assert 24 * len(cover) + sum(cover) == cheapest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_every_row_has_the_bits_it_has_alone(dtype: torch.dtype, bias: bool) -> None:
    layers = [linear(*shape, dtype, bias) for shape in SHAPES]
    tiles = calibrate(layers)
    for layer in layers:
        tiled = TiledLinear(layer, tiles)
        rows = torch.randn(300, layer.in_features).to(dtype)
        alone = torch.cat([tiled(row[None]) for row in rows])
        assert alone.dtype == dtype
        for count in (1, 2, 7, 8, 9, 31, 63, 64, 65, 100, 128, 200, 257, 300):
            for first in {0, 300 - count}:
                out = tiled(rows[first : first + count])
                assert torch.equal(out, alone[first : first + count]), (layer, count, str(tiles))
        torch.testing.assert_close(alone, layer(rows), rtol=2e-2, atol=2e-2)


def test_leading_dimensions_are_kept() -> None:
    layer = linear(32, 7, torch.float32)
    tiled = TiledLinear(layer, calibrate([layer]))
    assert tiled(torch.randn(1, 13, 32)).shape == (1, 13, 7)
    assert tiled(torch.randn(0, 32)).shape == (0, 7)
    assert (tiled.in_features, tiled.out_features) == (32, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_calibration_depends_on_shapes_alone(dtype: torch.dtype) -> None:
    layers = [linear(*shape, dtype) for shape in SHAPES]
    first = calibrate(layers)
    torch.manual_seed(99)
    torch.randn(10)
    assert calibrate(reversed(layers)) == first
    assert calibrate([*layers, *layers]) == first
    assert set(first.sizes) <= set(LADDER)


def test_a_model_without_linear_layers_gets_some_tile() -> None:
    assert calibrate([]).padded(1) >= 1


def test_rows_whose_products_cancel_tell_orders_of_addition_apart() -> None:
    """Two kernels that add in opposite orders look alike on random rows, in half precision."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(32, 16, bias=False).to(torch.bfloat16)
    rows = row_tiles.telling(linear)

    def differing(some: torch.Tensor) -> float:
        products = (some.float().unsqueeze(1) * linear.weight.float()).detach()
        ends = [torch.zeros(len(some), 16), torch.zeros(len(some), 16)]
        for i in range(32):
            ends = [ends[0] + products[..., i], ends[1] + products[..., 31 - i]]
        first, last = (end.to(torch.bfloat16) for end in ends)
        return float((first != last).any(-1).float().mean())

    assert differing(rows[0::3]) < 0.1
    assert differing(rows[1::3]) > 0.9
