"""A grammar's packed mask: every implementation, one body."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from kernels.test_implementations import rows_of, run
from torch import Tensor

from specbatch.kernels.rejection.reference import verify_blocks, verify_tokens
from specbatch.kernels.verify import reference
from specbatch.kernels.verify.contract import SamplingRows, Verdict

KINDS = ("greedy", "temperature", "filtered")


@pytest.fixture(params=["reference", "cpu", "triton"])
def implementation(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def packed(rows: list[set[int]], vocab: int) -> Tensor:
    """int32 [rows, ceil(vocab / 32)]; the bits behind the vocabulary are set, as xgrammar does."""
    words = []
    for allowed in rows:
        for start in range(0, vocab, 32):
            bits = sum(1 << i for i in range(32) if start + i in allowed or start + i >= vocab)
            words.append(bits - (1 << 32) if bits >> 31 else bits)
    return torch.tensor(words, dtype=torch.int32).view(len(rows), -1)


def test_bits_are_those_of_the_format() -> None:
    mask = packed([{0, 31, 32}], 40)
    assert mask.tolist() == [[1 - 2**31, 1 - 2**8]]
    assert reference.unpacked(mask, 40).nonzero()[:, 1].tolist() == [0, 31, 32]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 111, 1025])
def test_tokens_are_those_with_all_others_forbidden(
    implementation: str, vocab: int, kind: str
) -> None:
    logits, draft, offsets, counters, sampling = rows_of(vocab, kind)
    allowed = [set(range(vocab)) for _ in range(7)]
    for row in (1, 2, 4, 5):
        allowed[row] = set(random.sample(range(vocab), max(1, vocab // 3)))
    if vocab > 1:
        allowed[2] -= {int(sampling.forbidden_tokens[-1])} if kind == "filtered" else set()
        allowed[2] = allowed[2] or {int(logits[2].argmin())}
    pairs = [(r, t) for r in range(7) for t in range(vocab) if t not in allowed[r]]
    rows, tokens = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(dim=1)
    named = replace(
        sampling,
        forbidden_rows=torch.cat((sampling.forbidden_rows, rows)),
        forbidden_tokens=torch.cat((sampling.forbidden_tokens, tokens)),
    )
    masked = replace(sampling, allowed=packed(allowed, vocab))
    expected = reference.verify(logits, draft, offsets, counters, named)
    got: Verdict = run(implementation, "verify", "verify", logits, draft, offsets, counters, masked)
    assert torch.equal(got.tokens, expected.tokens)
    assert torch.equal(got.accepted, expected.accepted)
    torch.testing.assert_close(got.logprobs, expected.logprobs, rtol=1e-6, atol=2e-6)
    assert all(int(token) in of for token, of in zip(got.tokens, allowed, strict=True))
    alone = run(implementation, "verify", "sample", logits, counters, masked)
    assert torch.equal(alone, expected.tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_of_everything_changes_no_bit(implementation: str, kind: str) -> None:
    logits, draft, offsets, counters, sampling = rows_of(111, kind)
    everything = torch.full((7, 4), -1, dtype=torch.int32)
    plain: Verdict = run(
        implementation, "verify", "verify", logits, draft, offsets, counters, sampling
    )
    masked: Verdict = run(
        *(implementation, "verify", "verify", logits, draft, offsets, counters),
        replace(sampling, allowed=everything),
    )
    assert torch.equal(masked.tokens, plain.tokens)
    assert torch.equal(masked.logprobs, plain.logprobs)


def hopeless(kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor, SamplingRows]:
    """Row 1: nothing allowed; row 3: what is allowed is forbidden; row 5: it is at -inf."""
    logits, draft, offsets, counters, sampling = rows_of(111, kind)
    allowed = [set(range(111)) for _ in range(7)]
    allowed[1], allowed[3], allowed[5] = set(), {8, 9}, {40}
    logits[5, 40] = -torch.inf
    forbidden = torch.tensor([3, 3]), torch.tensor([8, 9])
    sampling = replace(
        sampling,
        forbidden_rows=torch.cat((sampling.forbidden_rows, forbidden[0])),
        forbidden_tokens=torch.cat((sampling.forbidden_tokens, forbidden[1])),
        allowed=packed(allowed, 111),
    )
    return logits, draft, offsets, counters, sampling


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_with_nothing_left_has_a_nan_log_probability(implementation: str, kind: str) -> None:
    arguments = hopeless(kind)
    got: Verdict = run(implementation, "verify", "verify", *arguments)
    assert got.logprobs.isnan().tolist() == [False, True, False, True, False, True, False]
    assert ((got.tokens >= 0) & (got.tokens < 111)).all()
    expected = reference.verify(*arguments)
    assert torch.equal(got.tokens[::2], expected.tokens[::2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verify", [verify_tokens, verify_blocks])
def test_rejection_heeds_masks_and_says_the_same(verify: Callable[..., Verdict], kind: str) -> None:
    logits, draft, offsets, counters, sampling = hopeless(kind)
    draft_probs = torch.full((4, 111), 1 / 111)
    got: Verdict = verify(logits, draft_probs, draft, offsets, counters, sampling)
    assert got.logprobs[[1, 3, 5]].isnan().all()
    assert not got.logprobs[[0, 2, 4, 6]].isnan().any()
