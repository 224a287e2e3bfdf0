"""Noise and verification: every implementation against the definition, in one test body.

Noise has the definition's very bits, and so has every token; log-probabilities may round otherwise.
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from specbatch.kernels.counters import reference as noise
from specbatch.kernels.verify import reference
from specbatch.kernels.verify.contract import PLACEHOLDER, SamplingRows, Verdict
from support.devices import on_triton_device

NONE = torch.tensor([], dtype=torch.int64)
KINDS = {
    "counters": ("gumbel",),
    "verify": ("verify", "sample"),
    "paged_attention": ("paged_attention",),
}


def module_of(kernel: str, implementation: str) -> ModuleType:
    return importlib.import_module(f"specbatch.kernels.{kernel}.{implementation}")


@pytest.fixture(params=["cpu", "triton"])
def implementation(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def run(implementation: str, kernel: str, function: str, *args: Any) -> Any:
    """The function's result; memory that it forgets to write is NaN or far out of range."""
    called = getattr(module_of(kernel, implementation), function)
    return (on_triton_device(called) if implementation == "triton" else called)(*args)


@pytest.fixture(autouse=True)
def _new_memory_is_nan() -> Any:
    """With deterministic algorithms, torch fills what `empty` returns."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def counters_of(rows: int) -> Tensor:
    counters = torch.randint(0, 2**62, (rows, 2))
    counters[:, 1] %= 4096
    counters[0] = torch.tensor([2**63 - 1, 0])
    return counters


def rows_of(vocab: int, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor, SamplingRows]:
    """Arguments of `verify`: seven rows of three sequences."""
    rows = 7
    logits = torch.randn(rows, vocab) * 3
    temperature = torch.tensor([0.7, 1.0, 0.0, 1e-9, 2.5, 0.3, 0.0])
    if kind == "greedy":
        temperature = torch.zeros(rows)
        logits = logits.round()  # full of ties
    sampling = SamplingRows(
        temperature=temperature,
        top_k=torch.zeros(rows, dtype=torch.int64),
        top_p=torch.ones(rows),
        min_p=torch.zeros(rows),
        forbidden_rows=NONE,
        forbidden_tokens=NONE,
        any_sampled=kind != "greedy",
        any_top_k=False,
        any_top_p=False,
        any_min_p=False,
    )
    if kind == "filtered":
        sampling = replace(
            sampling,
            top_k=torch.tensor([0, 1, 5, 50, 0, 10, 0]),
            top_p=torch.tensor([0.9, 1, 1, 0.5, 1, 1, 1]),
            min_p=torch.tensor([0.0, 0.1, 0, 0, 0.02, 0, 0]),
            forbidden_rows=torch.tensor([0, 2]) if vocab > 1 else NONE,
            forbidden_tokens=logits[[0, 2]].argmax(dim=1) if vocab > 1 else NONE,
            any_top_k=True,
            any_top_p=True,
            any_min_p=True,
        )
    offsets, counters = torch.tensor([0, 3, 4, 7]), counters_of(rows)
    draft = reference.sample(logits, counters, sampling)
    draft[5] = (draft[5] + 1) % max(vocab, 2)
    draft[offsets[1:] - 1] = PLACEHOLDER
    return logits, draft, offsets, counters, sampling


@pytest.mark.parametrize("stream", [0, 1, 7])
@pytest.mark.parametrize("vocab", [1, 2, 63, 111, 500, 1023, 1025, 2500])
def test_noise_has_the_bits_of_the_definition(implementation: str, vocab: int, stream: int) -> None:
    counters = counters_of(5)
    got = run(implementation, "counters", "gumbel", counters, vocab, stream)
    assert torch.equal(got, noise.gumbel(counters, vocab, stream))
    assert run(implementation, "counters", "gumbel", counters[:0], vocab).shape == (0, vocab)


@pytest.mark.parametrize("kind", ["greedy", "temperature", "filtered"])
@pytest.mark.parametrize("vocab", [1, 63, 111, 1024, 2500])
def test_verdicts_are_those_of_the_definition(implementation: str, vocab: int, kind: str) -> None:
    arguments = rows_of(vocab, kind)
    expected = reference.verify(*arguments)
    got: Verdict = run(implementation, "verify", "verify", *arguments)
    assert torch.equal(got.tokens, expected.tokens)
    assert torch.equal(got.accepted, expected.accepted)
    assert got.accepted.tolist() == [2, 0, 1]
    torch.testing.assert_close(got.logprobs, expected.logprobs, rtol=1e-6, atol=2e-6)
    logits, _, _, counters, sampling = arguments
    tokens = run(implementation, "verify", "sample", logits, counters, sampling)
    assert torch.equal(tokens, expected.tokens)


@pytest.mark.parametrize("kind", ["greedy", "temperature", "filtered"])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(implementation: str, kind: str) -> None:
    logits, _, _, counters, sampling = rows_of(2500, kind)
    nothing = torch.full((7,), PLACEHOLDER)
    whole: Verdict = run(
        implementation, "verify", "verify", logits, nothing, torch.arange(8), counters, sampling
    )
    for row in range(7):
        one = slice(row, row + 1)
        here = sampling.forbidden_rows == row
        alone: Verdict = run(
            *(implementation, "verify", "verify"),
            *(logits[one], nothing[one], torch.tensor([0, 1]), counters[one]),
            replace(
                sampling,
                temperature=sampling.temperature[one],
                top_k=sampling.top_k[one],
                top_p=sampling.top_p[one],
                min_p=sampling.min_p[one],
                forbidden_rows=sampling.forbidden_rows[here] - row,
                forbidden_tokens=sampling.forbidden_tokens[here],
                any_sampled=bool(sampling.temperature[row] > 0),
            ),
        )
        assert torch.equal(alone.tokens, whole.tokens[one])
        assert torch.equal(alone.logprobs, whole.logprobs[one])


@pytest.mark.parametrize("kind", ["greedy", "temperature"])
def test_spoilt_rows_have_nan_logprobs_and_spoil_no_other(implementation: str, kind: str) -> None:
    logits, draft, offsets, counters, sampling = rows_of(1100, kind)
    before: Verdict = run(
        implementation, "verify", "verify", logits, draft, offsets, counters, sampling
    )
    logits[1, 700] = torch.nan
    logits[4] = torch.nan
    after: Verdict = run(
        implementation, "verify", "verify", logits, draft, offsets, counters, sampling
    )
    whole = torch.tensor([0, 2, 3, 5, 6])
    assert torch.equal(after.tokens[whole], before.tokens[whole])
    assert torch.equal(after.logprobs[whole], before.logprobs[whole])
    assert after.logprobs[[1, 4]].isnan().all()
    assert ((after.tokens >= 0) & (after.tokens < 1100)).all()


def test_minus_infinity_everywhere_but_one_token(implementation: str) -> None:
    """A tile without a finite logit must add nothing, and not NaN."""
    logits, draft, offsets, counters, sampling = rows_of(2500, "temperature")
    logits[:] = -torch.inf
    logits[:, 2400] = 1.5
    got: Verdict = run(
        implementation, "verify", "verify", logits, draft, offsets, counters, sampling
    )
    assert got.tokens.tolist() == [2400] * 7
    assert got.logprobs.tolist() == [0.0] * 7


@pytest.mark.parametrize("width", [1, 63, 1024, 2500])
def test_running_sums_are_near_torch_s_and_keep_their_bits_in_any_company(width: int) -> None:
    x = torch.rand(5, width).softmax(dim=1)
    whole = run("triton", "verify", "running_sum", x)
    torch.testing.assert_close(whole, reference.running_sum(x), rtol=1e-5, atol=1e-7)
    assert (whole.diff(dim=1) >= 0).all()
    for row in range(5):
        alone = run("triton", "verify", "running_sum", x[row : row + 1])
        assert torch.equal(alone[0], whole[row])


@pytest.mark.parametrize("kernel", list(KINDS))
def test_signatures_agree(kernel: str, implementation: str) -> None:
    """Names, order, kinds, defaults and annotations."""
    for function in KINDS[kernel]:
        ours = getattr(module_of(kernel, implementation), function)
        theirs = getattr(module_of(kernel, "reference"), function)
        assert inspect.signature(ours) == inspect.signature(theirs)


@pytest.mark.pipeline  # slow imports
def test_triton_is_imported_only_by_those_who_ask_for_it() -> None:
    code = (
        "import sys, specbatch.kernels.counters.cpu, specbatch.kernels.paged_attention.cpu\n"
        "import specbatch.kernels.verify.cpu, specbatch.kernels.rejection.reference\n"
        "import specbatch.pipeline.engines.exact.sampling.sampler\n"
        "assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
