"""Depth, company, drafts, sharing and preemption: whatever they are, not one bit differs.

Each case of the product is compared with one run of the same requests, one at a time, without
drafts, with nothing shared and nothing preempted. By default a few cases stand for the product;
the tier `long` has all of it.
"""

from __future__ import annotations

import itertools
from dataclasses import astuple, replace
from functools import lru_cache
from pathlib import Path

import pytest
from engine.bitwise import (
    EVERY_CASE,
    PLAIN,
    ROOMY_BLOCKS,
    ROOMY_PASSES,
    TIGHT_BLOCKS,
    TIGHT_PASSES,
    Case,
    Guess,
    Replay,
    assert_same_bits,
    covering,
    mixed_prompts,
    requests_of,
    run,
)
from engine.decoding import VOCAB, bench

from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.schemas.records import FinishReason
from support import demo
from support.models import tiny_llama

pytestmark = pytest.mark.pipeline  # runs models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with grouped heads that the native pass can run."""
    folder = tmp_path_factory.mktemp("bitwise") / "model"
    return tiny_llama(folder, vocab_size=VOCAB, hidden=128, layers=2, heads=4, kv_heads=2, seed=1)


@lru_cache(maxsize=8)
def mixed_requests(count: int) -> list[Request]:
    return requests_of(mixed_prompts(count), VOCAB)


@lru_cache(maxsize=1)
def demo_requests() -> list[Request]:
    """The demo's 256 prompts, half of them behind a common beginning of two blocks."""
    prompts = [tuple(ids) for ids in demo.prompt_ids()]
    common = tuple(itertools.chain(*prompts[:8]))[:64]
    return requests_of(
        [((*common, *ids) if i % 2 else ids)[:120] for i, ids in enumerate(prompts)], 2048
    )


# By concurrency: each stands for the first so many of the requests. Those that run one at a time
# take the most steps.
NATIVE, TORCH = {1: 20, 7: 36, 64: 100}, {1: 6, 7: 12, 64: 20}

_truths: dict[tuple[Path, bool, str, int], dict[str, Completion]] = {}


def truth(model: Path, native: bool, dtype: str, asked: list[Request]) -> dict[str, Completion]:
    """One at a time, one token at a time."""
    key = model, native, dtype, len(asked)
    if key not in _truths:
        one = bench(
            model,
            dtype=dtype,
            native=native,
            max_sequences=PLAIN.concurrent,
            num_blocks=ROOMY_BLOCKS,
            share_prefixes=PLAIN.share,
        )
        _truths[key], peak = run(one, [replace(r, depth=PLAIN.depth) for r in asked])
        stats = one.engine.stats
        assert (peak, stats.proposed, stats.reused_tokens, one.blocks.preempted) == (1, 0, 0, 0)
    return _truths[key]


def check(
    case: Case, model: Path, native: bool, asked: list[Request], count: int | None = None
) -> None:
    """`count`: run the first so many of the requests, not all."""
    told = truth(model, native, case.dtype, asked)
    asked = asked[:count]
    expected = {request.request_id: told[request.request_id] for request in asked}
    tokens = {name: completion.token_ids for name, completion in expected.items()}
    asked = [
        replace(
            request,
            depth=8 if case.depth is None else case.depth,
            draft_ids=tokens[request.request_id] if case.drafts == "right" else (),
        )
        for request in asked
    ]
    one = bench(
        model,
        dtype=case.dtype,
        native=native,
        others=[Guess(tokens, case.depth is None)] if case.drafts == "random" else [],
        blocks=Replay(case.depth is None),
        max_sequences=case.concurrent,
        max_batch_tokens=TIGHT_PASSES[case.concurrent] if case.preempted else ROOMY_PASSES,
        num_blocks=TIGHT_BLOCKS[case.concurrent] if case.preempted else ROOMY_BLOCKS,
        share_prefixes=case.share,
    )
    got, peak = run(one, asked, squeeze=case.preempted)
    assert_same_bits(got, expected)
    one.assert_all_blocks_are_free()
    # Every axis did what its name says.
    stats = one.engine.stats
    assert (one.blocks.preempted > 0) == case.preempted
    assert one.blocks.preempted == one.engine._scheduler.preemptions
    assert (stats.reused_tokens > 0) == case.share
    fits = min(case.concurrent, len(asked))
    assert fits // 8 < peak <= fits
    assert peak == fits or case.preempted or case.concurrent > len(asked)
    assert (stats.proposed > 0) == case.drafting
    if case.drafting and case.drafts == "right":
        assert stats.accepted == stats.proposed
    elif case.drafting:
        assert 0 < stats.accepted < stats.proposed
    deepest = max(len(completion.proposed_at_depth) for completion in got.values())
    assert deepest == (0 if not case.drafting else 8 if case.depth is None else case.depth)


def test_the_requests_are_worth_asking(model: Path) -> None:
    """Mixed lengths, ends and tokens, and beginnings that are alike for more than a block."""
    asked = mixed_requests(500)
    lengths = {len(r.prompt_ids) for r in asked}
    assert len(asked) == 500
    assert min(lengths) == 1
    assert max(lengths) > 115
    beginnings = [r.prompt_ids[:33] for r in asked if len(r.prompt_ids) > 33]
    assert len(set(beginnings)) < len(beginnings) / 2
    expected = truth(model, True, "bfloat16", mixed_requests(100)).values()
    assert {c.finish_reason for c in expected} == {FinishReason.STOP, FinishReason.LENGTH}
    assert len({token for c in expected for token in c.token_ids}) > 150


@pytest.mark.parametrize("strength", [2, 3])
def test_few_cases_have_all_combinations(strength: int) -> None:
    assert len(set(EVERY_CASE)) == 4 * 3 * 3 * 2 * 2 * 2
    few = covering(strength)
    for axes in itertools.combinations(range(6), strength):
        every, some = (
            {tuple(astuple(case)[axis] for axis in axes) for case in cases}
            for cases in (EVERY_CASE, few)
        )
        assert some == every


@pytest.mark.parametrize("case", covering(3), ids=str)
def test_no_bit_differs(model: Path, case: Case) -> None:
    check(case, model, True, mixed_requests(100), NATIVE[case.concurrent])


@pytest.mark.parametrize("case", covering(2), ids=str)
def test_no_bit_differs_on_the_torch_path(model: Path, case: Case) -> None:
    check(case, model, False, mixed_requests(20), TORCH[case.concurrent])


@pytest.mark.long
@pytest.mark.parametrize("case", EVERY_CASE, ids=str)
def test_no_bit_differs_in_any_case_of_500_prompts(model: Path, case: Case) -> None:
    check(case, model, native=True, asked=mixed_requests(500))


@pytest.mark.long
@pytest.mark.parametrize("case", covering(2), ids=str)
def test_no_bit_differs_in_the_demo(case: Case) -> None:
    check(case, demo.VERIFIER, native=True, asked=demo_requests())


@pytest.mark.long
@pytest.mark.parametrize("case", covering(3), ids=str)
def test_no_bit_differs_on_the_torch_path_in_more_cases(model: Path, case: Case) -> None:
    check(case, model, native=False, asked=mixed_requests(80))
