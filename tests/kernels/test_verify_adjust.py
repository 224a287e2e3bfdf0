"""Penalties, biases and forbidden tokens, in the definition, in C and in Triton: one body."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernels.test_verify import counters_of, naive_process, random_row, sampling_of
from torch import Tensor

from specbatch.kernels.verify import cpu, reference, triton
from specbatch.kernels.verify.contract import PLACEHOLDER, Adjustments, SamplingRows
from support.devices import INTERPRETED, on_triton_device

Entry = tuple[int, int, float, float]  # row, token, scale, add


TRITON = SimpleNamespace(
    verify=on_triton_device(triton.verify), sample=on_triton_device(triton.sample)
)


@pytest.fixture(params=["reference", "cpu", "triton"])
def verify_with(request: pytest.FixtureRequest) -> Any:
    return {"reference": reference, "cpu": cpu, "triton": TRITON}[request.param]


def is_slow(verify_with: Any) -> bool:
    """Triton's interpreter takes milliseconds a row: fewer of them for it."""
    return INTERPRETED and verify_with is TRITON


def adjusted(sampling: SamplingRows, entries: list[Entry]) -> SamplingRows:
    rows, tokens, scale, add = zip(*sorted(entries), strict=True)
    ids: Callable[[Any], Tensor] = lambda x: torch.tensor(x, dtype=torch.int64)  # noqa: E731 - short
    reals: Callable[[Any], Tensor] = lambda x: torch.tensor(x, dtype=torch.float32)  # noqa: E731 - short
    return replace(sampling, adjust=Adjustments(ids(rows), ids(tokens), reals(scale), reals(add)))


def entries_of(rows: int, vocab: int) -> list[Entry]:
    """About a third of the rows stay as they are."""
    return [
        (row, token, random.choice([1.0, 1.3, 0.7, 4.0]), random.choice([0.0, -1.5, 2.25, 100.0]))
        for row in range(rows)
        if row % 3
        for token in random.sample(range(vocab), random.randint(1, min(vocab, 40)))
    ]


def naive_adjust(logits: list[float], row: int, entries: list[Entry]) -> list[float]:
    out = list(logits)
    for r, token, scale, add in entries:
        if r == row:
            x = out[token]
            out[token] = (x / scale if x > 0 else x * scale) + add
    return out


@pytest.mark.parametrize("vocab", [1, 111, 2048])
def test_adjusting_comes_first_and_is_the_naive_one(vocab: int) -> None:
    logits = torch.randn(30, vocab) * 3
    params = [random_row(vocab) for _ in range(30)]
    params[0] |= {"temperature": 0.8}
    pairs = [(row, t) for row in range(0, 30, 4) for t in range(0, vocab - 1, 7)]
    entries = entries_of(30, vocab)
    before = logits.clone()
    got = reference.process(logits, adjusted(sampling_of(params, pairs), entries))
    assert torch.equal(logits, before)
    for row, parameters in enumerate(params):
        moved = naive_adjust(logits[row].tolist(), row, entries)
        forbidden = {t for r, t in pairs if r == row}
        expected = torch.tensor(naive_process(moved, parameters, forbidden))
        assert torch.equal(got[row].isinf(), expected.isinf()), (row, parameters)
        torch.testing.assert_close(got[row], expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("vocab", [2, 111, 2048])
@pytest.mark.parametrize("rows", [1, 64])
def test_tokens_are_those_of_logits_changed_beforehand(
    verify_with: Any, rows: int, vocab: int
) -> None:
    rows, times = (min(rows, 9), 1) if is_slow(verify_with) else (rows, 4)
    for _ in range(times):
        logits = torch.randn(rows, vocab) * 3
        params = [random_row(vocab) for _ in range(rows)]
        entries = [*entries_of(rows, vocab), (0, vocab - 1, 1.0, 7.5)]
        pairs = [(row, t) for row in range(0, rows, 4) for t in range(0, vocab - 1, 7)]
        plain = sampling_of(params, pairs)
        at, draft = counters_of(rows), torch.full((rows,), PLACEHOLDER)
        offsets = torch.arange(rows + 1)
        got = verify_with.verify(logits, draft, offsets, at, adjusted(plain, entries))
        moved = reference.adjusted(logits, adjusted(plain, entries).adjust)  # type: ignore[arg-type] # set just above
        expected = verify_with.sample(moved, at, plain)
        assert torch.equal(got.tokens, expected)
        assert torch.equal(verify_with.sample(logits, at, adjusted(plain, entries)), got.tokens)
        # Log-probabilities stay those of the model, whatever was asked.
        unprocessed = logits.log_softmax(dim=1).gather(1, got.tokens[:, None])[:, 0]
        torch.testing.assert_close(got.logprobs, unprocessed, rtol=0, atol=1e-4)


def test_they_choose_what_the_definition_chooses(verify_with: Any) -> None:
    for seed in range(1 if is_slow(verify_with) else 20):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(40, 300, generator=generator) * 3
        params = [random_row(300) | {"top_p": 1.0} for _ in range(40)]
        sampling = adjusted(sampling_of(params, [(3, 5), (3, 6), (7, 0)]), entries_of(40, 300))
        expected = reference.sample(logits, counters_of(40), sampling)
        assert torch.equal(verify_with.sample(logits, counters_of(40), sampling), expected)


def test_a_forbidden_token_is_never_chosen_whatever_its_bias(verify_with: Any) -> None:
    logits = torch.randn(2, 50)
    for temperature in (0.0, 1.0):
        plain = sampling_of([{"temperature": temperature}] * 2, [(0, 9)])
        sampling = adjusted(plain, [(0, 9, 1.0, 100.0), (1, 9, 1.0, 100.0)])
        first, second = verify_with.sample(logits, counters_of(2), sampling).tolist()
        assert first != 9
        assert second == 9


def test_scales_work_by_sign(verify_with: Any) -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0], [-1.0, -1.1, -5.0]])
    sampling = adjusted(sampling_of([{}] * 2), [(0, 0, 2.0, 0.0), (1, 0, 2.0, 0.0)])
    assert verify_with.sample(logits, counters_of(2), sampling).tolist() == [1, 1]
    assert math.isclose(float(reference.process(logits, sampling)[1, 0]), -2.0)
