"""The noise: Philox as published, Gumbel as defined, and pure in every sense."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from scipy import stats

from specbatch.kernels.counters.reference import exponential, gumbel, philox4x32, random_words

Words = tuple[int, ...]
MASK = 0xFFFFFFFF


def naive_philox(counter: Words, key: Words) -> Words:
    """Philox4x32-10 in Python's own integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def naive_word(seed: int, position: int, token: int, stream: int = 0) -> int:
    key = (seed & MASK, seed >> 32 & MASK)
    return naive_philox((token // 4, position, stream, 0), key)[token % 4]


def philox(counter: Words, key: Words) -> Words:
    c0, c1, c2, c3 = (torch.tensor([w]) for w in counter)
    k0, k1 = (torch.tensor([w]) for w in key)
    return tuple(int(w) for w in philox4x32((c0, c1, c2, c3), (k0, k1)))


def rows(*pairs: tuple[int, int]) -> torch.Tensor:
    return torch.tensor(pairs, dtype=torch.int64)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        pytest.param(
            (0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8", id="all bits zero"
        ),
        pytest.param((MASK,) * 4, (MASK,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd", id="one"),
        pytest.param(
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
            id="digits of pi",
        ),
    ],
)
def test_known_answers_of_the_random123_library(counter: Words, key: Words, expected: str) -> None:
    answer = tuple(int(word, 16) for word in expected.split())
    assert philox(counter, key) == answer
    assert naive_philox(counter, key) == answer


def test_random_inputs_agree_with_python_integers() -> None:
    for _ in range(200):
        counter = tuple(random.getrandbits(32) for _ in range(4))
        key = tuple(random.getrandbits(32) for _ in range(2))
        assert philox(counter, key) == naive_philox(counter, key)


@pytest.mark.parametrize("stream", [0, 1, 7])
def test_words_follow_the_layout_of_counter_and_key(stream: int) -> None:
    seeds = [0, 1, 2**32 - 1, 2**32, 2**63 - 1]
    counters = rows(*((seed, position) for seed in seeds for position in (0, 1, 2047)))
    words = random_words(counters, 11, stream)
    expected = [
        [naive_word(seed, position, token, stream) for token in range(11)]
        for seed, position in counters.tolist()
    ]
    assert words.tolist() == expected


def test_noise_does_not_depend_on_order_batch_or_vocabulary() -> None:
    counters = torch.randint(0, 2**62, (63, 2))
    counters[:, 1] %= 4096
    whole = gumbel(counters, 111)
    order = torch.randperm(63)
    assert torch.equal(gumbel(counters[order], 111), whole[order])
    assert torch.equal(torch.cat([gumbel(row[None], 111) for row in counters]), whole)
    for vocab in (1, 2, 3, 4, 5, 110):
        assert torch.equal(gumbel(counters, vocab), whole[:, :vocab])
    assert torch.equal(gumbel(counters, 2048)[:, :111], whole)
    assert gumbel(counters[:0], 111).shape == (0, 111)


def test_each_part_of_a_counter_changes_the_noise() -> None:
    base = gumbel(rows((5, 9)), 64)
    for other in (rows((6, 9)), rows((5 + 2**32, 9)), rows((5, 10))):
        assert (gumbel(other, 64) != base).float().mean() > 0.95
    assert (gumbel(rows((5, 9)), 64, stream=1) != base).float().mean() > 0.95


def test_logarithms_are_as_good_as_float32_can_be() -> None:
    edges = torch.tensor([0, 1, 2**30 - 1, 2**30, 2**31, 2**31 + 1, MASK - 1, MASK])
    words = torch.cat((edges, torch.randint(0, 2**32, (100_000,)), 2 ** torch.arange(32)))
    u = (words.double() + 0.5) / 2.0**32
    exact = -torch.log1p(-u)
    got = exponential(words)
    assert torch.all(torch.isfinite(got) & (got > 0))
    assert ((got.double() - exact).abs() / exact).max() < 4e-7


def test_gumbel_agrees_with_float64_logarithms() -> None:
    counters = torch.randint(0, 2**62, (64, 2))
    u = (random_words(counters, 2048).double() + 0.5) / 2.0**32
    exact = -torch.log(-torch.log1p(-u))
    got = gumbel(counters, 2048)
    assert got.dtype == torch.float32
    assert (got.double() - exact).abs().max() < 4e-6


def test_extreme_words_give_finite_noise_in_the_right_order() -> None:
    smallest = -math.log(float(exponential(torch.tensor([0]))))
    largest = -math.log(float(exponential(torch.tensor([MASK]))))
    assert smallest == pytest.approx(33 * math.log(2), rel=1e-6)
    assert largest == pytest.approx(-math.log(33 * math.log(2)), rel=1e-6)


@pytest.mark.parametrize("along", ["tokens", "positions", "seeds"])
def test_noise_follows_the_gumbel_law(along: str) -> None:
    count = 100_000
    if along == "tokens":
        noise = gumbel(rows((12345, 0)), count)[0]
    else:
        index = torch.arange(count)
        fixed = torch.full((count,), 7)
        columns = (fixed, index) if along == "positions" else (index, fixed)
        noise = gumbel(torch.stack(columns, dim=1), 1)[:, 0]
    assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > 1e-3
    # KS looks at the middle; the tails are counted.
    cells = np.histogram(stats.gumbel_r.cdf(noise.double().numpy()), bins=1000, range=(0, 1))[0]
    assert stats.chisquare(cells).pvalue > 1e-3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param((1, 0, 0), (1, 0, 1), id="streams"),
        pytest.param((1, 0, 0), (1, 1, 0), id="positions"),
        pytest.param((1, 0, 0), (2, 0, 0), id="seeds"),
        pytest.param((1, 0, 0), (1 + 2**32, 0, 0), id="high words of seeds"),
    ],
)
def test_noise_of_different_counters_is_independent(
    one: tuple[int, int, int], other: tuple[int, int, int]
) -> None:
    count, cells = 100_000, 8
    a, b = (
        stats.gumbel_r.cdf(gumbel(rows((seed, at)), count, stream)[0].double().numpy())
        for seed, at, stream in (one, other)
    )
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(count)
    table = np.histogram2d(a, b, bins=cells, range=((0, 1), (0, 1)))[0]
    assert stats.chi2_contingency(table).pvalue > 1e-3
