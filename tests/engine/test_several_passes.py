"""Without drafts, a step makes several passes in one call: same tokens, same accounts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.decoding import Bench, assert_same, baseline_of, bench, prompts, watch_text

from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.schemas.records import FinishReason, Origin, SamplingParams
from support.grids import pairwise
from support.models import TinyPair

# The torch path makes one pass at a time.
pytestmark = pytest.mark.parametrize("tiny_pair", ["native"], indirect=True, scope="session")

ASKED = [
    SamplingParams(max_tokens=30),
    SamplingParams(max_tokens=9, temperature=0.9, top_k=20),
    SamplingParams(max_tokens=40, temperature=1.2, top_p=0.8, min_p=0.05),
    SamplingParams(max_tokens=1, temperature=0.7),
    SamplingParams(max_tokens=25, temperature=1.0, stop_token_ids=tuple(range(0, 256, 9))),
    SamplingParams(max_tokens=17, logprobs=True),
]


def requests(count: int, depth: int | None = 0) -> list[Request]:
    asked = [ASKED[i % len(ASKED)] for i in range(count)]
    return [
        Request(str(i), prompt, params, seed=i, depth=depth)
        for i, (prompt, params) in enumerate(zip(prompts(count), asked, strict=True))
    ]


def calls_of(one: Bench) -> int:
    """Run all of it; the number of steps."""
    calls = 0
    while not one.engine.idle:
        one.step()
        calls += 1
    return calls


@pairwise(
    at_once=[2, 4, 8], concurrent=[1, 3, 12], tight=[False, True], dtype=["float32", "bfloat16"]
)
def test_outputs_are_those_of_a_pass_at_a_time(
    tiny_pair: TinyPair, at_once: int, concurrent: int, tight: bool, dtype: str
) -> None:
    asked = requests(18)
    blocks = {"num_blocks": 10} if tight else {}
    one = bench(
        tiny_pair.verifier, dtype=dtype, max_sequences=concurrent, passes_at_once=at_once, **blocks
    )
    one.add(*asked)
    calls = calls_of(one)
    for request in asked:
        completion = one.finished[request.request_id]
        assert_same(completion, baseline_of(tiny_pair.verifier, dtype)(request))
        assert_accounted(completion)
    stats = one.engine.stats
    assert stats.generated_tokens == sum(len(c.token_ids) for c in one.finished.values())
    assert stats.verifier_passes == sum(c.verifier_passes for c in one.finished.values())
    assert calls < stats.steps, "nothing was made at once"


def assert_accounted(completion: Completion) -> None:
    """Every token has its pass, with a step of its own."""
    passes = completion.provenance
    assert set(completion.origins) <= {Origin.PLAIN}
    assert len(passes.steps) == len(passes.pass_ticks) == len(completion.token_ids)
    assert all(a < b for a, b in zip(passes.steps, passes.steps[1:], strict=False))
    assert sum(passes.pass_ticks) <= completion.ticks.total


def test_time_is_shared_without_remainder(tiny_pair: TinyPair) -> None:
    one = bench(tiny_pair.verifier, passes_at_once=8).add(*requests(12))
    calls_of(one)
    kinds = zip(*(c.ticks.in_order for c in one.finished.values()), strict=True)
    assert [sum(kind) for kind in kinds] == one.engine.stats.time


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=12, top_logprobs=2),
        SamplingParams(max_tokens=12, presence_penalty=0.5),
        SamplingParams(max_tokens=12, logit_bias=((3, 1.5),)),
        SamplingParams(max_tokens=12, stop=("zz",)),
        SamplingParams(max_tokens=12, bad_token_ids=(5,)),
    ],
    ids=["top_logprobs", "penalty", "bias", "stop string", "bad token"],
)
def test_what_looks_at_each_token_goes_pass_by_pass(
    tiny_pair: TinyPair, params: SamplingParams
) -> None:
    prompt = prompts(1)[0]
    request = Request("0", prompt, params, seed=1, depth=0, watch_text=watch_text(params))
    one = bench(tiny_pair.verifier, passes_at_once=8).add(request)
    assert calls_of(one) == one.engine.stats.steps
    assert_same(one.finished["0"], baseline_of(tiny_pair.verifier)(request))


def test_drafts_are_verified_pass_by_pass(tiny_pair: TinyPair) -> None:
    asked = requests(6, depth=3)
    one = bench(tiny_pair.verifier, tiny_pair.draft, passes_at_once=8).add(*asked)
    calls_of(one)
    assert one.engine.stats.accepted
    for request in asked:
        assert_same(one.finished[request.request_id], baseline_of(tiny_pair.verifier)(request))


def test_a_call_that_raises_changes_nothing(tiny_pair: TinyPair) -> None:
    asked = requests(6)
    one = bench(tiny_pair.verifier, passes_at_once=8).add(*asked)
    refused = []

    def raising(*args: Any) -> Any:
        refused.append(args)
        raise MemoryError("no room")

    one.runners[0].generate = raising  # type: ignore[method-assign]  # memory is never short here
    assert calls_of(one) == one.engine.stats.steps
    assert refused
    for request in asked:
        assert_same(one.finished[request.request_id], baseline_of(tiny_pair.verifier)(request))


def test_nan_fails_its_own_sequence(tiny_pair: TinyPair) -> None:
    """A NaN in the KV of one sequence ends that one; the others never read it."""
    asked = requests(6)
    one = bench(tiny_pair.verifier, passes_at_once=8).add(*asked)
    one.step()
    victim = one.engine.unfinished[0]
    poison(one, victim.kv.blocks[0])
    calls_of(one)
    for request in asked:
        completion = one.finished[request.request_id]
        if request.request_id == victim.request.request_id:
            assert completion.finish_reason is FinishReason.ERROR
            assert "NaN" in (completion.error or "")
        else:
            assert_same(completion, baseline_of(tiny_pair.verifier)(request))


def poison(one: Bench, block: int) -> None:
    decoder: Any = one.runners[0]._decoder
    for cache in decoder._caches:
        cache.view(one.runners[0].blocks.num_blocks, -1)[block] = torch.nan


@pytest.mark.parametrize(("at_once", "is_measure"), [(1, True), (8, False)])
def test_a_lone_pass_whose_drafts_were_not_there_is_no_price_of_depth_0(
    tiny_pair: TinyPair, at_once: int, is_measure: bool
) -> None:
    """Depth 0 would have made it in a call with others."""
    one = bench(tiny_pair.verifier, passes_at_once=at_once).add(*requests(6, depth=3))
    assert calls_of(one) == one.engine.stats.steps
    assert bool(one.engine.knowledge.step_time.observations) is is_measure
