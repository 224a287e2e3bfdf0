"""The most likely tokens of a row, on request: every implementation, one body."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from kernels.test_implementations import rows_of, run
from torch import Tensor

from specbatch.kernels.verify import reference
from specbatch.kernels.verify.contract import SamplingRows, TopRows, TopTokens, Verdict
from support.grids import pairwise

Arguments = tuple[Tensor, Tensor, Tensor, Tensor, SamplingRows]
KINDS = ("greedy", "temperature", "filtered")  # the first is full of ties


@pytest.fixture(params=["reference", "cpu", "triton"])
def implementation(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def asking(arguments: Arguments, rows: list[int], count: int) -> Arguments:
    top = TopRows(torch.tensor(rows, dtype=torch.int64), count)
    return (*arguments[:4], replace(arguments[4], top=top))


def verdict_of(implementation: str, arguments: Arguments) -> tuple[Verdict, TopTokens]:
    verdict: Verdict = run(implementation, "verify", "verify", *arguments)
    assert verdict.top is not None
    return verdict, verdict.top


@pairwise(kind=KINDS, count=[1, 3, 20], vocab=[1, 7, 111, 1025, 2500])
def test_they_are_the_first_of_the_naively_sorted_row(
    implementation: str, vocab: int, count: int, kind: str
) -> None:
    arguments = asking(rows_of(vocab, kind), [0, 2, 3, 6], count)
    logits = arguments[0]
    _, top = verdict_of(implementation, arguments)
    assert top.rows.tolist() == [0, 2, 3, 6]
    assert top.tokens.shape == top.logprobs.shape == (4, min(count, vocab))
    for slot, row in enumerate([0, 2, 3, 6]):
        values = logits[row].tolist()
        expected = sorted(range(vocab), key=lambda token: (-values[token], token))[:count]
        assert top.tokens[slot].tolist() == expected
        law = logits[row].double().log_softmax(dim=0)[expected]
        torch.testing.assert_close(top.logprobs[slot].double(), law, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_chosen_token_has_the_same_bits_among_them(implementation: str, kind: str) -> None:
    verdict, top = verdict_of(implementation, asking(rows_of(111, kind), list(range(7)), 111))
    for row in range(7):
        at = top.tokens[row].tolist().index(int(verdict.tokens[row]))
        assert top.logprobs[row, at] == verdict.logprobs[row]


@pytest.mark.parametrize("kind", KINDS)
def test_asking_changes_nothing_else(implementation: str, kind: str) -> None:
    plain = rows_of(1100, kind)
    before: Verdict = run(implementation, "verify", "verify", *plain)
    assert before.top is None
    after, _ = verdict_of(implementation, asking(plain, [1, 4], 5))
    assert torch.equal(after.tokens, before.tokens)
    assert torch.equal(after.logprobs, before.logprobs)
    assert torch.equal(after.accepted, before.accepted)
    logits, _, _, counters, sampling = asking(plain, [1, 4], 5)
    tokens = run(implementation, "verify", "sample", logits, counters, sampling)
    assert torch.equal(tokens, before.tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_depend_neither_on_the_batch_nor_on_how_many_are_asked_for(
    implementation: str, kind: str
) -> None:
    arguments = rows_of(2500, kind)
    _, whole = verdict_of(implementation, asking(arguments, list(range(7)), 20))
    logits, draft, _, counters, sampling = asking(arguments, [0], 6)
    for row in range(7):
        one = slice(row, row + 1)
        here = sampling.forbidden_rows == row
        alone = replace(
            sampling,
            temperature=sampling.temperature[one],
            top_k=sampling.top_k[one],
            top_p=sampling.top_p[one],
            min_p=sampling.min_p[one],
            forbidden_rows=sampling.forbidden_rows[here] - row,
            forbidden_tokens=sampling.forbidden_tokens[here],
        )
        _, top = verdict_of(
            implementation,
            (logits[one], draft[one] * 0 - 1, torch.tensor([0, 1]), counters[one], alone),
        )
        assert torch.equal(top.tokens[0], whole.tokens[row, :6])
        assert torch.equal(top.logprobs[0], whole.logprobs[row, :6])


def test_forbidden_and_filtered_tokens_are_among_them(implementation: str) -> None:
    """They tell of the model, not of what the request makes of it."""
    arguments = rows_of(500, "filtered")
    verdict, top = verdict_of(implementation, asking(arguments, [0, 2], 1))
    assert torch.equal(top.tokens[:, 0], arguments[4].forbidden_tokens)
    assert not torch.equal(top.tokens[:, 0], verdict.tokens[[0, 2]])


def test_tokens_at_minus_infinity_come_last_by_their_ids(implementation: str) -> None:
    arguments = rows_of(1100, "greedy")
    arguments[0][3] = -math.inf
    arguments[0][3, [1050, 4]] = torch.tensor([2.0, 1.0])
    _, top = verdict_of(implementation, asking(arguments, [3], 5))
    assert top.tokens.tolist() == [[1050, 4, 0, 1, 2]]
    assert top.logprobs[0, 2:].tolist() == [-math.inf] * 3
    assert top.logprobs[0, :2].exp().sum() == pytest.approx(1)


@pytest.mark.parametrize("kind", ["greedy", "temperature"])
def test_nan_makes_the_rows_log_probabilities_nan_and_no_others(
    implementation: str, kind: str
) -> None:
    arguments = rows_of(1100, kind)
    _, before = verdict_of(implementation, asking(arguments, [0, 1, 4, 5], 20))
    arguments[0][1, 700] = torch.nan
    arguments[0][4] = torch.nan
    _, after = verdict_of(implementation, asking(arguments, [0, 1, 4, 5], 20))
    assert after.logprobs[[1, 2]].isnan().all()
    assert 700 not in after.tokens[1].tolist()
    assert after.tokens[2].tolist() == list(range(20))
    assert torch.equal(after.tokens[[0, 3]], before.tokens[[0, 3]])
    assert torch.equal(after.logprobs[[0, 3]], before.logprobs[[0, 3]])


def test_c_and_triton_agree_with_the_definition_on_every_token() -> None:
    for vocab in (2, 63, 64, 65, 300):
        arguments = asking(rows_of(vocab, "greedy"), list(range(7)), vocab)
        expected = reference.verify(*arguments).top
        assert expected is not None
        for implementation in ("cpu", "triton"):
            _, top = verdict_of(implementation, arguments)
            assert torch.equal(top.tokens, expected.tokens)
            torch.testing.assert_close(top.logprobs, expected.logprobs, rtol=1e-6, atol=2e-6)
