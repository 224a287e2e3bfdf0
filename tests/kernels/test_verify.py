"""Verification against naive row-by-row implementations. Its laws are in test_verify_laws.py."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specbatch.kernels.counters.reference import gumbel
from specbatch.kernels.rejection.reference import verify_tokens
from specbatch.kernels.verify.contract import PLACEHOLDER, SamplingRows, Verdict
from specbatch.kernels.verify.reference import match_prefix, process, sample, verify

GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def sampling_of(
    rows: Sequence[dict[str, Any]], forbidden: Sequence[tuple[int, int]] = ()
) -> SamplingRows:
    rows = [GREEDY | row for row in rows]
    return SamplingRows(
        temperature=torch.tensor([r["temperature"] for r in rows], dtype=torch.float32),
        top_k=torch.tensor([r["top_k"] for r in rows], dtype=torch.int64),
        top_p=torch.tensor([r["top_p"] for r in rows], dtype=torch.float32),
        min_p=torch.tensor([r["min_p"] for r in rows], dtype=torch.float32),
        forbidden_rows=torch.tensor([r for r, _ in forbidden], dtype=torch.int64),
        forbidden_tokens=torch.tensor([t for _, t in forbidden], dtype=torch.int64),
        any_sampled=any(r["temperature"] > 0 for r in rows),
        any_top_k=any(r["top_k"] > 0 for r in rows),
        any_top_p=any(r["top_p"] < 1 for r in rows),
        any_min_p=any(r["min_p"] > 0 for r in rows),
    )


def naive_process(logits: list[float], row: dict[str, Any], forbidden: set[int]) -> list[float]:
    """One row in Python floats: the sentence of the docstring, word for word."""
    row = GREEDY | row
    off = -math.inf
    scores = [off if t in forbidden else x for t, x in enumerate(logits)]
    if row["temperature"] > 0:
        scores = [x / row["temperature"] for x in scores]
    if row["top_k"]:
        floor = sorted(scores, reverse=True)[min(row["top_k"], len(scores)) - 1]
        scores = [x if x >= floor else off for x in scores]
    if row["top_p"] < 1:
        top = max(scores)
        total = sum(math.exp(x - top) for x in scores)
        reached, kept = 0.0, set()
        for token in sorted(range(len(scores)), key=lambda t: -scores[t]):
            if reached >= row["top_p"]:
                break
            kept.add(token)
            reached += math.exp(scores[token] - top) / total
        scores = [x if t in kept else off for t, x in enumerate(scores)]
    if row["min_p"]:
        floor = max(scores) + math.log(row["min_p"])
        scores = [x if x >= floor else off for x in scores]
    return scores


def random_row(vocab: int) -> dict[str, Any]:
    return {
        "temperature": random.choice([0.0, 0.3, 0.8, 1.0, 2.5]),
        "top_k": random.choice([0, 0, 1, 2, 50, vocab, 10 * vocab]),
        "top_p": random.choice([1.0, 1.0, 0.999, 0.95, 0.5, 1e-6]),
        "min_p": random.choice([0.0, 0.0, 0.02, 0.3, 1.0]),
    }


def counters_of(rows: int) -> Tensor:
    return torch.stack((torch.arange(rows) * 7919 + 3, torch.arange(rows) % 40), dim=1)


@pytest.mark.parametrize("rows", [1, 63])
@pytest.mark.parametrize("vocab", [1, 111, 2048])
def test_processing_is_the_naive_one(rows: int, vocab: int) -> None:
    for _ in range(3):
        logits = torch.randn(rows, vocab) * 3
        params = [random_row(vocab) for _ in range(rows)]
        params[0] |= {"temperature": 0.8}  # processing of an all-greedy batch is a test of its own
        pairs = [(row, t) for row in range(0, rows, 3) for t in range(0, vocab - 1, 5)]
        got = process(logits.clone(), sampling_of(params, pairs))
        for row, parameters in enumerate(params):
            forbidden = {t for r, t in pairs if r == row}
            expected = torch.tensor(naive_process(logits[row].tolist(), parameters, forbidden))
            assert torch.equal(got[row].isinf(), expected.isinf()), (row, parameters)
            torch.testing.assert_close(got[row], expected, rtol=1e-5, atol=1e-5)


def test_processing_leaves_its_input_alone() -> None:
    logits = torch.randn(5, 111)
    before = logits.clone()
    verify(
        logits,
        torch.full((5,), PLACEHOLDER),
        torch.arange(6),
        counters_of(5),
        sampling_of([{"temperature": 1.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1}] * 5, [(1, 2)]),
    )
    assert torch.equal(logits, before)


def test_greedy_is_the_argmax_and_ties_take_the_first() -> None:
    logits = torch.randn(63, 111).round()  # full of ties
    sampling = sampling_of([{}] * 63)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert sample(logits, counters_of(63), sampling).tolist() == expected
    limited = sampling_of([{"top_k": 3, "top_p": 0.3, "min_p": 0.5}] * 63)
    assert sample(logits, counters_of(63), limited).tolist() == expected
    beside = sampling_of([{"top_k": 3, "top_p": 0.3}] * 62 + [{"temperature": 1.0, "top_k": 3}])
    assert sample(logits, counters_of(63), beside).tolist()[:62] == expected[:62]


def test_top_p_of_equal_tokens_keeps_the_first() -> None:
    scores = process(torch.zeros(1, 8), sampling_of([{"temperature": 1.0, "top_p": 0.5}]))
    assert scores.isfinite().tolist() == [[True] * 4 + [False] * 4]


def test_greedy_never_takes_a_forbidden_token() -> None:
    logits = torch.randn(3, 111)
    best = logits.argmax(dim=1).tolist()
    pairs = [(0, best[0]), (2, best[2])]
    got = sample(logits, counters_of(3), sampling_of([{}] * 3, pairs)).tolist()
    assert got[1] == best[1]
    for row in (0, 2):
        assert got[row] == logits[row].argsort(descending=True)[1]


def test_sampling_is_the_argmax_of_processed_logits_plus_noise() -> None:
    logits, counters = torch.randn(63, 111) * 2, counters_of(63)
    params = [random_row(111) | {"temperature": 0.7} for _ in range(63)]
    sampling = sampling_of(params)
    expected = (process(logits, sampling) + gumbel(counters, 111)).argmax(dim=1)
    assert torch.equal(sample(logits, counters, sampling), expected)


@pytest.mark.parametrize("vocab", [1, 111, 2048])
def test_a_row_does_not_depend_on_its_batch(vocab: int) -> None:
    """Flags of the whole batch switch passes on that a row alone would not have."""
    rows = 63
    logits, counters = torch.randn(rows, vocab) * 2, counters_of(rows)
    params = [random_row(vocab) for _ in range(rows)]
    assert_alone_as_together(verify, logits, counters, params)


def assert_alone_as_together(
    sampled: Callable[..., Verdict],
    logits: Tensor,
    counters: Tensor,
    params: Sequence[dict[str, Any]],
) -> None:
    rows = len(params)
    offsets, nothing = torch.arange(rows + 1), torch.full((rows,), PLACEHOLDER)
    whole = sampled(logits, nothing, offsets, counters, sampling_of(params))
    for row in range(rows):
        one = slice(row, row + 1)
        alone = sampled(
            logits[one], nothing[one], offsets[:2], counters[one], sampling_of(params[one])
        )
        assert alone.tokens[0] == whole.tokens[row]
        assert alone.logprobs[0] == whole.logprobs[row]


def by_ratio(
    logits: Tensor, drafts: Tensor, offsets: Tensor, counters: Tensor, sampling: SamplingRows
) -> Verdict:
    none = torch.empty(0, logits.shape[1])
    return verify_tokens(logits, none, drafts, offsets, counters, sampling)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("sampled", [verify, by_ratio])
def test_a_lone_row_of_a_large_vocabulary_has_the_bits_that_it_has_beside_others(
    sampled: Callable[..., Verdict],
) -> None:
    """torch shares out the sum of one such row among threads, and of two it does not."""
    rows, vocab = 4, 151_936
    generator = torch.Generator().manual_seed(1)  # in one of them the order is seen
    logits, counters = torch.randn(rows, vocab, generator=generator) * 3, counters_of(rows)
    assert_alone_as_together(sampled, logits, counters, [{"temperature": 1.0}] * rows)


def test_logprobs_are_of_the_unprocessed_logits() -> None:
    logits = torch.randn(63, 111) * 4
    sampling = sampling_of([{"temperature": 0.3, "top_k": 4, "top_p": 0.9}] * 63, [(0, 1)])
    verdict = verify(
        logits, torch.full((63,), PLACEHOLDER), torch.arange(64), counters_of(63), sampling
    )
    expected = logits.double().log_softmax(dim=1).gather(1, verdict.tokens[:, None])[:, 0]
    torch.testing.assert_close(verdict.logprobs.double(), expected, rtol=0, atol=1e-5)


def test_nan_in_a_row_changes_no_other_row() -> None:
    logits, counters = torch.randn(9, 111), counters_of(9)
    params = [random_row(111) | {"temperature": float(i % 2)} for i in range(9)]
    draft, offsets = torch.full((9,), PLACEHOLDER), torch.tensor([0, 3, 6, 9])
    before = verify(logits, draft, offsets, counters, sampling_of(params))
    spoilt = logits.clone()
    spoilt[4, 50] = torch.nan
    after = verify(spoilt, draft, offsets, counters, sampling_of(params))
    rest = torch.arange(9) != 4
    assert torch.equal(after.tokens[rest], before.tokens[rest])
    assert torch.equal(after.logprobs[rest], before.logprobs[rest])
    assert after.logprobs[4].isnan()
    assert 0 <= int(after.tokens[4]) < 111


drafts_and_tokens = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=6), min_size=1, max_size=20
)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(drafts_and_tokens, st.data())
def test_match_prefix_is_the_naive_loop(
    blocks: list[list[tuple[int, int]]], data: st.DataObject
) -> None:
    draft, tokens, offsets, expected = [], [], [0], []
    for block in blocks:
        agreed = 0
        while agreed < len(block) and block[agreed][0] == block[agreed][1]:
            agreed += 1
        expected.append(agreed)
        draft += [d for d, _ in block] + [PLACEHOLDER]
        tokens += [t for _, t in block] + [data.draw(st.integers(0, 2))]
        offsets.append(len(tokens))
    got = match_prefix(torch.tensor(tokens), torch.tensor(draft), torch.tensor(offsets))
    assert got.tolist() == expected


def test_bonus_rows_are_never_accepted() -> None:
    logits = torch.randn(12, 111)
    best = logits.argmax(dim=1)
    sampling = sampling_of([{}] * 12)
    offsets = torch.tensor([0, 1, 6, 7, 12])
    draft = best.clone()
    draft[offsets[1:] - 1] = PLACEHOLDER
    verdict = verify(logits, draft, offsets, counters_of(12), sampling)
    assert torch.equal(verdict.tokens, best)
    assert verdict.accepted.tolist() == [0, 4, 0, 4]
    nothing = verify(logits, torch.full((12,), PLACEHOLDER), offsets, counters_of(12), sampling)
    assert nothing.accepted.tolist() == [0, 0, 0, 0]
    assert torch.equal(nothing.tokens, best)


def test_the_draft_changes_no_token() -> None:
    logits, counters = torch.randn(30, 111), counters_of(30)
    sampling = sampling_of([{"temperature": 1.0, "top_p": 0.9}] * 30)
    offsets = torch.arange(0, 31, 5)
    seen = [
        verify(logits, torch.randint(0, 111, (30,)), offsets, counters, sampling) for _ in range(3)
    ]
    assert torch.equal(seen[0].tokens, seen[1].tokens)
    assert torch.equal(seen[0].tokens, seen[2].tokens)


def test_flags_only_spare_work() -> None:
    logits, counters = torch.randn(20, 111), counters_of(20)
    sampling = sampling_of([{"temperature": 0.9}] * 10 + [{}] * 10)
    every = replace(sampling, any_top_k=True, any_top_p=True, any_min_p=True)
    assert torch.equal(process(logits, sampling), process(logits, every))
    greedy = sampling_of([{}] * 20)
    assert torch.equal(
        sample(logits, counters, greedy),
        sample(logits, counters, replace(greedy, any_sampled=True)),
    )
