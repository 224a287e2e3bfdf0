"""All levels of the C kernels give the same bits: float32 everywhere, bfloat16 apart from AMX."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from torch import Tensor

from specbatch.kernels import native
from specbatch.kernels.counters import cpu as counters_cpu
from specbatch.kernels.decoder.cpu import _Linear
from specbatch.kernels.verify import cpu as verify_cpu
from specbatch.kernels.verify.contract import SamplingRows
from support.grids import pairwise

LEVELS = native.available()
ALIKE_IN_BF16 = [level for level in LEVELS if level not in ("amx", "neon")]
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def product(level: str, x: Tensor, weight: Tensor, threads: int) -> Tensor:
    """x Wᵀ by one level's kernel; out was filled with NaN before."""
    kernels = native.at_level(level)
    code, (rows, k), n = DTYPES[weight.dtype], x.shape, weight.shape[0]
    panel = kernels.panel()
    packed = torch.empty(-(-n // panel) * panel * k, dtype=weight.dtype)
    kernels.pack(code, _at(weight), n, k, _at(packed))
    acts = torch.full((-(-rows // 32) * 32 * k,), math.nan)
    kernels.acts(code, rows, k, _at(x), _at(acts))
    out = torch.full((rows, n), math.nan)
    linear = _Linear(packed.data_ptr(), None, n, k)
    assert kernels.product(code, rows, _at(acts), ctypes.byref(linear), _at(out), threads) == 0
    return out


def _at(tensor: Tensor) -> int:
    return tensor.data_ptr()


def bits(tensor: Tensor) -> list[int]:
    return tensor.view(torch.int32).flatten().tolist()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pairwise(
    rows=[1, 2, 3, 5, 7, 13, 40, 129],
    shape=[(1, 32), (33, 64), (100, 96), (257, 320)],
    threads=[1, 2],
)
def test_products_have_the_same_bits_at_every_level(
    rows: int, shape: tuple[int, int], threads: int
) -> None:
    n, k = shape
    x, weight = random(rows, k), random(n, k, seed=1)
    expected = x.double() @ weight.double().T
    truth = bits(product("portable", x, weight, 1))
    for level in LEVELS:
        out = product(level, x, weight, threads)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)
        assert bits(out) == truth, level
    alone = bits(product(LEVELS[0], x[-1:].contiguous(), weight, 1))
    assert alone == truth[-n:], "a row has no neighbours"


@pairwise(rows=[1, 3, 5, 13, 40], shape=[(1, 32), (33, 64), (100, 96)], threads=[1, 2])
def test_bfloat16_products_have_the_same_bits_at_every_level_but_amx(
    rows: int, shape: tuple[int, int], threads: int
) -> None:
    n, k = shape
    # Exponents from the denormal to the large: what is flushed is flushed alike.
    scales = torch.exp2(torch.randint(-70, 40, (k,), generator=torch.Generator().manual_seed(2)))
    x = (random(rows, k) * scales).bfloat16().float()
    weight = (random(n, k, seed=1) * scales.flip(0)).bfloat16()
    truth = bits(product("portable", x, weight, 1))
    for level in ALIKE_IN_BF16:
        assert bits(product(level, x, weight, threads)) == truth, level


@pytest.mark.skipif("amx" not in LEVELS, reason="needs a processor with AMX")
def test_amx_adds_even_and_odd_products_of_a_tile_apart() -> None:
    x, weight = random(5, 96).bfloat16(), random(7, 96, seed=1).bfloat16()
    sums = torch.zeros(5, 7, dtype=torch.float64)
    for tile in range(0, 96, 32):
        even, odd = torch.zeros(5, 7).double(), torch.zeros(5, 7).double()
        for k in range(tile, tile + 32, 2):
            even = (even + x[:, None, k].double() * weight[None, :, k].double()).float().double()
            odd = (
                (odd + x[:, None, k + 1].double() * weight[None, :, k + 1].double())
                .float()
                .double()
            )
        sums = (sums + (even + odd).float().double()).float().double()
    assert bits(product("amx", x.float(), weight, 1)) == bits(sums.float())


@pytest.mark.parametrize("vocab", [1, 31, 500, 2048])
def test_noise_and_samples_have_the_same_bits_at_every_level(
    vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 12
    logits = random(rows, vocab) * 4
    logits[3, 0] = math.nan
    counters = torch.stack((torch.arange(rows) - 5, torch.arange(rows) * 1000), 1)
    sampling = SamplingRows(
        temperature=torch.tensor([0.0, 0.7, 1.3] * 4),
        top_k=torch.tensor([0, 0, 5, 40] * 3),
        top_p=torch.tensor([1.0, 0.9, 0.3] * 4),
        min_p=torch.tensor([0.0, 0.0, 0.05, 0.2, 0.0, 0.01] * 2),
        forbidden_rows=torch.empty(0, dtype=torch.int64),
        forbidden_tokens=torch.empty(0, dtype=torch.int64),
        any_sampled=True,
        any_top_k=True,
        any_top_p=True,
        any_min_p=True,
    )
    found = set()
    for level in LEVELS:
        monkeypatch.setenv(native.FORCED_BY, level)
        noise = counters_cpu.gumbel(counters, vocab, stream=3)
        verdict = verify_cpu.verify(
            logits, torch.full((rows,), -1), torch.arange(rows + 1), counters, sampling
        )
        found.add((tuple(bits(noise)), tuple(verdict.tokens.tolist()), str(bits(verdict.logprobs))))
    assert len(found) == 1


@pytest.mark.parametrize("flush", [True, False])
def test_the_callers_way_with_denormals_changes_nothing_and_is_kept(flush: bool) -> None:
    x, weight = torch.full((1, 32), 2.0**-70), torch.full((3, 32), 2.0**-70)
    torch.set_flush_denormal(flush)
    try:
        out = product(LEVELS[0], x, weight, 1)
        kept = bool((torch.tensor([2.0**-100]) * torch.tensor([2.0**-30]) == 0).item()) == flush
    finally:
        torch.set_flush_denormal(False)
    assert out.tolist() == [[32 * 2.0**-140] * 3], "float32 keeps them"
    assert kept


def test_rotary_tables_are_the_cosines_and_sines_of_rounded_angles() -> None:
    frequencies = torch.tensor([1.0, 0.3, 1e-3, 1e-5])
    cos, sin = torch.empty(2, 5000, 8)
    native.library().rotary(_at(frequencies), 5000, 4, 1.0, _at(cos), _at(sin))
    angles = (torch.arange(5000).float()[:, None] * frequencies).double()
    for table, expected in ((cos, angles.cos()), (sin, angles.sin())):
        assert torch.equal(table[:, :4], table[:, 4:])
        assert torch.equal(table[:, :4], expected.float()), "correctly rounded"
