"""Linear layers and norms in Triton: near the definition, and a row's bits in any company."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from specbatch.kernels.linear import reference as linear_reference
from specbatch.kernels.linear import triton as linear_triton
from specbatch.kernels.rms_norm import reference as norm_reference
from specbatch.kernels.rms_norm import triton as norm_triton
from specbatch.pipeline.engines.exact.model.batch_invariant.row_tiles import telling
from support.devices import INTERPRETED, on_triton_device

linear = on_triton_device(linear_triton.linear)
rms_norm = on_triton_device(norm_triton.rms_norm)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COUNTS = [1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 130]
NORMS = [(0.0, True), (0.0, False), (1.0, False)]  # Llama's, OLMo 2's, Gemma's
MOST = 130


@pytest.fixture(params=DTYPES, ids=lambda d: str(d)[6:])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture(autouse=True)
def _new_memory_is_nan() -> Any:
    """With deterministic algorithms, torch fills what `empty` returns."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_near(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype
    # Triton's interpreter cuts bfloat16 off where a GPU rounds, and norms round twice.
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 1e-3}[got.dtype]
    torch.testing.assert_close(got.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (63, 65), (64, 64), (200, 7), (96, 130)])
def test_products_are_those_of_the_definition(
    dtype: torch.dtype, inputs: int, outputs: int, bias: bool
) -> None:
    x = torch.randn(67, inputs).to(dtype)
    weight = (torch.randn(outputs, inputs) * inputs**-0.5).to(dtype)
    added = torch.randn(outputs).to(dtype) if bias else None
    assert_near(linear(x, weight, added), linear_reference.linear(x, weight, added))


def test_a_row_of_a_product_has_the_same_bits_at_any_number_of_rows(dtype: torch.dtype) -> None:
    x, weight = torch.randn(MOST, 150).to(dtype), torch.randn(70, 150).to(dtype)
    added = torch.randn(70).to(dtype)
    whole = linear(x, weight, added)
    assert len({tuple(row) for row in whole.tolist()}) == MOST
    for count in COUNTS:
        for first in {0, MOST - count}:
            some = linear(x[first : first + count], weight, added)
            assert torch.equal(some, whole[first : first + count]), f"{count} rows from {first}"


def test_a_spoilt_row_spoils_no_other(dtype: torch.dtype) -> None:
    x, weight = torch.randn(70, 40).to(dtype), torch.randn(9, 40).to(dtype)
    before = linear(x, weight)
    x[3] = torch.nan
    after = linear(x, weight)
    whole = torch.arange(70) != 3
    assert torch.equal(after[whole], before[whole])
    assert after[3].isnan().all()


def test_leading_dimensions_and_empty_passes_are_kept() -> None:
    weight, scale = torch.randn(7, 32), torch.randn(32)
    assert linear(torch.randn(1, 13, 32), weight).shape == (1, 13, 7)
    assert linear(torch.randn(0, 32), weight).shape == (0, 7)
    assert rms_norm(torch.randn(1, 5, 2, 32), scale, 1e-6).shape == (1, 5, 2, 32)
    assert rms_norm(torch.randn(1, 0, 32), scale, 1e-6).shape == (1, 0, 32)


def test_rows_that_do_not_lie_in_order_are_read_as_they_are() -> None:
    x, weight = torch.randn(40, 6), torch.randn(40, 9)
    assert_near(linear(x.t(), weight.t()), linear_reference.linear(x.t(), weight.t()))
    assert_near(
        rms_norm(x.t(), torch.ones(40), 0.1), norm_reference.rms_norm(x.t(), torch.ones(40), 0.1)
    )


@pytest.mark.parametrize(("offset", "round_first"), NORMS, ids=["llama", "olmo2", "gemma"])
@pytest.mark.parametrize("width", [1, 24, 64, 1000])
def test_norms_are_those_of_the_definition(
    dtype: torch.dtype, width: int, offset: float, round_first: bool
) -> None:
    x, weight = (torch.randn(5, width) * 3).to(dtype), torch.randn(width).to(dtype)
    arguments = (x, weight, 1e-5, offset, round_first)
    assert_near(rms_norm(*arguments), norm_reference.rms_norm(*arguments))


def test_a_row_of_a_norm_has_the_same_bits_at_any_number_of_rows(dtype: torch.dtype) -> None:
    x, weight = torch.randn(MOST, 600).to(dtype), torch.randn(600).to(dtype)
    whole = rms_norm(x, weight, 1e-6)
    for count in (1, 2, 16, 17, 100):
        some = rms_norm(x[MOST - count :], weight, 1e-6)
        assert torch.equal(some, whole[MOST - count :]), f"{count} rows"


@pytest.mark.parametrize(
    ("ours", "theirs", "function"),
    [
        (linear_triton, linear_reference, "linear"),
        (norm_triton, norm_reference, "rms_norm"),
    ],
    ids=["linear", "rms_norm"],
)
def test_signatures_agree(ours: ModuleType, theirs: ModuleType, function: str) -> None:
    assert inspect.signature(getattr(ours, function)) == inspect.signature(
        getattr(theirs, function)
    )


@pytest.mark.parametrize(
    ("rows", "outputs", "expected"),
    [
        (1, 4096, (16, 32)),
        (16, 14336, (16, 64)),
        (17, 1024, (64, 32)),
        (64, 14336, (64, 128)),
        (256, 1024, (64, 32)),
        (256, 4096, (64, 128)),
        (256, 14336, (128, 256)),
        (2048, 1024, (128, 128)),
        (2048, 128256, (128, 256)),
    ],
)
def test_the_largest_tile_that_keeps_a_gpu_busy_is_taken(
    rows: int, outputs: int, expected: tuple[int, int]
) -> None:
    assert linear_triton.tile_of(rows, outputs)[:2] == expected


@pytest.mark.skipif(INTERPRETED, reason="the interpreter's products depend on their shape")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_tiles_give_a_row_the_same_bits(dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(640, 640, bias=False, dtype=dtype, device="cuda")
    rows = telling(layer.requires_grad_(False))
    expected = linear_triton.linear_in_tiles(rows, layer.weight, None, linear_triton.CONSTANT)
    for tile in linear_triton.TILES:
        got = linear_triton.linear_in_tiles(rows, layer.weight, None, tile)
        assert torch.equal(got, expected), tile
