"""Rejection keeps the verifier's law, whatever was drafted; and accepts as often as promised."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from specbatch.kernels.counters import cpu
from specbatch.kernels.counters.reference import gumbel
from specbatch.kernels.rejection.reference import verify_blocks, verify_tokens
from specbatch.kernels.verify.contract import PLACEHOLDER, SamplingRows, TopRows, Verdict
from specbatch.kernels.verify.reference import process, top_tokens

Test = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, SamplingRows], Verdict]
DRAWS = 40_000
BLOCK_NOISE = 99  # a stream for drafts that must be fresh for every block
NONE = torch.tensor([], dtype=torch.int64)


def sampling_of(
    temperature: Tensor, top_k: int = 0, top_p: float = 1.0, forbidden: Tensor = NONE
) -> SamplingRows:
    rows = len(temperature)
    return SamplingRows(
        temperature=temperature,
        top_k=torch.full((rows,), top_k),
        top_p=torch.full((rows,), top_p),
        min_p=torch.zeros(rows),
        forbidden_rows=torch.arange(rows)[: len(forbidden)],
        forbidden_tokens=forbidden,
        any_sampled=bool((temperature > 0).any()),
        any_top_k=top_k > 0,
        any_top_p=top_p < 1,
        any_min_p=False,
    )


def plain(rows: int) -> SamplingRows:
    return sampling_of(torch.ones(rows))


def seeds_at(position: int, count: int = DRAWS) -> Tensor:
    seeds = torch.arange(count) * 0x9E3779B97F4A7C1 & (2**63 - 1)
    return torch.stack((seeds, torch.full_like(seeds, position)), dim=1)


def drawn(law: Tensor, counters: Tensor, stream: int = 0) -> Tensor:
    return (law.log() + gumbel(counters, law.shape[-1], stream)).argmax(dim=1)


def random_law(*shape: int, seed: int, spread: float = 1.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * spread).softmax(dim=-1)


def blocks(
    target: Tensor,  # [num_seqs, depth + 1, vocab]: laws
    draft: Tensor,  # [num_seqs, depth, vocab]: laws
    tokens: Tensor,  # [num_seqs, depth]
    counters: Tensor,  # [num_seqs, 2] of the first rows
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, SamplingRows]:
    """Arguments of a test of equally long blocks."""
    num_seqs, rows = target.shape[:2]
    bonus = torch.full((num_seqs, 1), PLACEHOLDER)
    places = torch.stack((torch.zeros(rows), torch.arange(rows)), dim=1).long()
    return (
        target.log().flatten(0, 1),
        draft.flatten(0, 1),
        torch.cat((tokens, bonus), dim=1).flatten(),
        torch.arange(num_seqs + 1) * rows,
        (counters[:, None] + places).flatten(0, 1),
        plain(num_seqs * rows),
    )


def assert_law(tokens: Tensor, law: Tensor) -> None:
    counts = np.bincount(tokens.numpy(), minlength=len(law))
    expected = law.double().numpy()
    assert counts[expected == 0].sum() == 0, "a token without probability was emitted"
    kept = expected > 0
    expected = expected[kept] / expected[kept].sum() * len(tokens)
    if len(expected) == 1:
        return  # nothing left to compare
    assert stats.chisquare(counts[kept], expected).pvalue > 1e-3


IMPLEMENTATIONS = {
    "tokens": verify_tokens,
    "blocks": verify_blocks,
    "tokens in C": partial(verify_tokens, noise=cpu.gumbel),
    "blocks in C": partial(verify_blocks, noise=cpu.gumbel),
}


@pytest.fixture(params=list(IMPLEMENTATIONS.values()), ids=list(IMPLEMENTATIONS))
def test(request: pytest.FixtureRequest) -> Test:
    chosen: Test = request.param
    return chosen


PAIRS = [
    pytest.param(random_law(7, seed=1), random_law(7, seed=2), id="7 tokens"),
    pytest.param(random_law(32, seed=3), random_law(32, seed=4, spread=0.5), id="32, flat draft"),
    pytest.param(random_law(5, seed=5), random_law(5, seed=5), id="draft is the target"),
    pytest.param(random_law(5, seed=6), torch.eye(5)[2], id="draft is certain"),
    pytest.param(torch.tensor([0.5, 0.5, 0, 0]), torch.tensor([0, 0, 0.3, 0.7]), id="disjoint"),
    pytest.param(torch.tensor([1.0]), torch.tensor([1.0]), id="one token"),
]


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_the_first_emitted_token_follows_the_target_and_acceptance_is_the_overlap(
    test: Test, p: Tensor, q: Tensor
) -> None:
    at = seeds_at(5)
    draft = drawn(q.expand(DRAWS, -1), at)
    target = torch.stack((p, p.flip(0))).expand(DRAWS, -1, -1)
    verdict = test(*blocks(target, q.expand(DRAWS, 1, -1), draft[:, None], at))
    first, bonus = verdict.tokens.view(DRAWS, 2).unbind(dim=1)
    accepted = verdict.accepted.bool()
    assert torch.equal(first[accepted], draft[accepted])
    assert_law(first, p)
    if accepted.any():
        assert_law(bonus[accepted], p.flip(0))
    overlap = float(torch.minimum(p, q).double().sum())
    sigma = math.sqrt(max(overlap * (1 - overlap), 0.0) / DRAWS)
    assert abs(float(accepted.double().mean()) - overlap) <= 3 * sigma + 1e-6


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_three_tokens_over_several_blocks_follow_the_target_jointly(test: Test, depth: int) -> None:
    """Two Markov chains over three tokens; all 27 endings are counted.

    The ratio test may meet the draft noise of a position again, block verification may not.
    """
    vocab, count = 3, DRAWS
    p, q = random_law(vocab + 1, vocab, seed=7), random_law(vocab + 1, vocab, seed=8)
    text = torch.full((count, 1), vocab)  # a start symbol before any token
    ends = torch.ones(count, dtype=torch.int64)
    text = torch.cat((text, torch.zeros(count, 3 + depth + 1, dtype=torch.int64)), dim=1)
    while bool((ends <= 3).any()):
        live = torch.arange(count)[ends <= 3]
        seeds = seeds_at(0)[live]
        at = seeds + torch.stack((torch.zeros_like(live), ends[live]), dim=1)
        before, seen, draft_laws, drafts = text[live, ends[live] - 1], [], [], []
        for j in range(depth):
            seen.append(before)
            draft_laws.append(q[before])
            if test in (verify_tokens, IMPLEMENTATIONS["tokens in C"]):
                noise = at + torch.tensor([0, j]), 0
            else:
                noise = at, BLOCK_NOISE + j
            before = drawn(draft_laws[-1], *noise)
            drafts.append(before)
        target = p[torch.stack([*seen, before], dim=1)]
        verdict = test(*blocks(target, torch.stack(draft_laws, 1), torch.stack(drafts, 1), at))
        new = verdict.tokens.view(len(live), depth + 1)
        for j in range(depth + 1):
            written = live[verdict.accepted >= j]
            text[written, ends[written] + j] = new[verdict.accepted >= j, j]
        ends[live] += verdict.accepted + 1
    a, b, c = text[:, 1], text[:, 2], text[:, 3]
    law = torch.stack(
        [p[vocab, x] * p[x, y] * p[y, z] for x, y, z in product(range(vocab), repeat=3)]
    )
    assert_law((a * vocab + b) * vocab + c, law)


def test_blocks_accept_at_least_as_many_tokens_as_the_ratio_test() -> None:
    depth, vocab = 4, 8
    p, q = random_law(depth + 1, vocab, seed=9), random_law(depth, vocab, seed=10)
    at = seeds_at(0)
    drafts = torch.stack(
        [drawn(q[j].expand(DRAWS, -1), at, BLOCK_NOISE + j) for j in range(depth)], dim=1
    )
    arguments = blocks(p.expand(DRAWS, -1, -1), q.expand(DRAWS, -1, -1), drafts, at)
    one, other = (run(*arguments).accepted.double() for run in (verify_tokens, verify_blocks))
    sigma = math.sqrt(float(one.var() + other.var()) / DRAWS)
    assert float(other.mean()) > float(one.mean()) + 3 * sigma  # here it is strictly better


def test_acceptance_of_blocks_is_the_optimum_in_a_case_done_by_hand() -> None:
    """Two tokens of P = (1/3, 2/3), Q = (2/3, 1/3): the paper's example, 10/9 against 11/9."""
    p, q = torch.tensor([1 / 3, 2 / 3]), torch.tensor([2 / 3, 1 / 3])
    at = seeds_at(0)
    drafts = torch.stack([drawn(q.expand(DRAWS, -1), at, BLOCK_NOISE + j) for j in range(2)], dim=1)
    arguments = blocks(p.expand(DRAWS, 3, -1), q.expand(DRAWS, 2, -1), drafts, at)
    for run, expected in ((verify_tokens, 10 / 9), (verify_blocks, 11 / 9)):
        accepted = run(*arguments).accepted.double()
        assert abs(float(accepted.mean()) - expected) < 3 * float(accepted.std()) / DRAWS**0.5


def ragged(
    vocab: int, lengths: tuple[int, ...] = (1, 6, 2, 9, 1, 4)
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, SamplingRows]:
    """Blocks of any length over random laws, some rows greedy, drafts from their own laws."""
    rows = sum(lengths)
    offsets = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)])
    is_bonus = torch.zeros(rows, dtype=torch.bool)
    is_bonus[offsets[1:] - 1] = True
    counters = torch.stack((torch.arange(rows) // 3 * 7919 + 3, torch.arange(rows)), dim=1)
    logits = torch.randn(rows, vocab) * 2
    q = (logits + torch.randn(rows, vocab) * 0.5).softmax(dim=1)
    draft = torch.where(is_bonus, PLACEHOLDER, drawn(q, counters))
    temperature = torch.where(torch.arange(rows) % 4 == 3, 0.0, 0.9)
    return logits, q[~is_bonus], draft, offsets, counters, sampling_of(temperature)


@pytest.mark.parametrize("vocab", [1, 2, 63, 111, 1000])
def test_a_sequence_does_not_depend_on_its_batch(test: Test, vocab: int) -> None:
    logits, q, draft, offsets, counters, sampling = ragged(vocab)
    whole = test(logits, q, draft, offsets, counters, sampling)
    for i, (first, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        rows = slice(first, end)
        alone = test(
            logits[rows],
            q[first - i : end - i - 1],
            draft[rows],
            torch.tensor([0, end - first]),
            counters[rows],
            sampling_of(sampling.temperature[rows]),
        )
        assert torch.equal(alone.tokens, whole.tokens[rows])
        assert torch.equal(alone.logprobs, whole.logprobs[rows])
        assert torch.equal(alone.accepted, whole.accepted[i : i + 1])
        assert 0 <= int(alone.accepted) < end - first


def test_greedy_rows_accept_exactly_the_argmax(test: Test) -> None:
    logits, q, draft, offsets, counters, _ = ragged(11)
    best = logits.argmax(dim=1)
    verdict = test(logits, q, draft, offsets, counters, sampling_of(torch.zeros(len(draft))))
    for i, (first, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        agreed = 0
        while draft[first + agreed] == best[first + agreed]:
            agreed += 1
        assert int(verdict.accepted[i]) == agreed < end - first
        emitted = slice(first, first + agreed + 1)
        assert torch.equal(verdict.tokens[emitted], best[emitted])


def test_a_certain_draft_of_the_argmax_is_accepted_whole(test: Test) -> None:
    """Drafts without a model (n-grams) put all of Q on their token."""
    logits = torch.randn(5, 11)
    best = logits.argmax(dim=1)
    certain = torch.nn.functional.one_hot(best[:4], 11).float()
    draft = torch.cat((best[:4], torch.tensor([PLACEHOLDER])))
    greedy = sampling_of(torch.zeros(5))
    verdict = test(logits, certain, draft, torch.tensor([0, 5]), seeds_at(0, 5), greedy)
    assert verdict.accepted.tolist() == [4]
    assert torch.equal(verdict.tokens, best)


def test_what_processing_drops_is_never_emitted(test: Test) -> None:
    """Top-k and top-p shape P; a draft outside of it is rejected."""
    count, vocab = 2000, 12
    logits = torch.randn(vocab).expand(2 * count, -1)
    draft = torch.stack((torch.arange(count) % vocab, torch.full((count,), PLACEHOLDER)), dim=1)
    sampling = sampling_of(torch.full((2 * count,), 0.8), top_k=4, top_p=0.9)
    counters = seeds_at(1, 2 * count)
    flat = torch.full((count, vocab), 1 / vocab)
    offsets = torch.arange(0, 2 * count + 1, 2)
    verdict = test(logits, flat, draft.flatten(), offsets, counters, sampling)
    kept = process(logits[:1], sampling_of(torch.tensor([0.8]), 4, 0.9))[0].isfinite()
    assert 1 < int(kept.sum()) < vocab
    assert kept[verdict.tokens].all()
    expected = logits.log_softmax(dim=1).gather(1, verdict.tokens[:, None])[:, 0]
    torch.testing.assert_close(verdict.logprobs, expected)


def test_no_row_is_drafted(test: Test) -> None:
    logits = torch.randn(3, 111)
    verdict = test(
        logits,
        torch.empty(0, 111),
        torch.full((3,), PLACEHOLDER),
        torch.arange(4),
        seeds_at(0, 3),
        sampling_of(torch.tensor([0.0, 1.0, 1.0])),
    )
    assert verdict.accepted.tolist() == [0, 0, 0]
    assert verdict.tokens[0] == logits[0].argmax()


def test_a_nan_row_is_rejected_says_so_and_spoils_no_other(test: Test) -> None:
    logits, q, draft, offsets, counters, sampling = ragged(111)
    before = test(logits, q, draft, offsets, counters, sampling)
    spoilt = logits.clone()
    spoilt[3, 50] = torch.nan  # the third row of the second sequence, rows 1 to 6
    after = test(spoilt, q, draft, offsets, counters, sampling)
    rest = (torch.arange(len(draft)) < 1) | (torch.arange(len(draft)) >= 7)
    assert torch.equal(after.tokens[rest], before.tokens[rest])
    assert torch.equal(after.logprobs[rest], before.logprobs[rest])
    assert int(after.accepted[1]) <= 2
    assert after.logprobs[3].isnan()
    assert 0 <= int(after.tokens[3]) < 111


def test_a_row_with_nothing_left_says_so_where_its_token_is_drawn(test: Test) -> None:
    logits, q, draft, offsets, counters, sampling = ragged(11)
    gone = torch.tensor([0, 3, 12])  # a bonus row alone, and rows within two drafts
    spoilt = logits.clone()
    spoilt[gone] = -torch.inf
    verdict = test(spoilt, q, draft, offsets, counters, sampling)
    drawn_at = offsets[:-1] + verdict.accepted
    told = verdict.logprobs[drawn_at].isnan()
    assert torch.equal(told, torch.isin(drawn_at, gone))
    assert told[0]
    for first, end, at in zip(offsets[:-1], offsets[1:], drawn_at, strict=True):
        before = gone[(gone >= first) & (gone < end)]
        assert (at <= before).all(), "a draft was accepted where nothing is left"
        assert verdict.logprobs[first:at].isfinite().all()


def test_the_most_likely_tokens_are_told_of_the_rows_that_ask(test: Test) -> None:
    *arguments, sampling = ragged(111)
    logits = arguments[0]
    asking = replace(sampling, top=TopRows(torch.tensor([0, 4, 9, 22]), 5))
    plain_verdict, verdict = test(*arguments, sampling), test(*arguments, asking)
    assert plain_verdict.top is None
    assert torch.equal(verdict.tokens, plain_verdict.tokens)
    assert torch.equal(verdict.logprobs, plain_verdict.logprobs)
    expected = top_tokens(logits, logits.logsumexp(dim=1), asking.top)
    assert verdict.top is not None
    assert expected is not None
    assert torch.equal(verdict.top.rows, expected.rows)
    assert torch.equal(verdict.top.tokens, expected.tokens)
    assert torch.equal(verdict.top.logprobs, expected.logprobs)


def test_signatures_agree() -> None:
    assert inspect.signature(verify_tokens) == inspect.signature(verify_blocks)


@pytest.mark.parametrize("kind", ["tokens", "blocks"])
def test_c_emits_what_the_definition_emits(kind: str) -> None:
    arguments = ragged(1000)
    expected, got = IMPLEMENTATIONS[kind](*arguments), IMPLEMENTATIONS[f"{kind} in C"](*arguments)
    assert torch.equal(got.tokens, expected.tokens)
    assert torch.equal(got.logprobs, expected.logprobs)
    assert torch.equal(got.accepted, expected.accepted)
