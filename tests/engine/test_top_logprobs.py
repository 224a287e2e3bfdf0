"""The most likely tokens of a completion: those of the model, and the same however it is made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.decoding import (
    VOCAB,
    alone,
    assert_same,
    baseline_of,
    bench,
    prompts,
    watch_text,
)

from specbatch.kernels.verify import reference
from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.pipeline.engines.exact.sampling.sampling import Columns, top_rows
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.schemas.records import FinishReason, SamplingParams
from support.grids import pairwise
from support.models import TinyPair

SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, top_k=40, top_p=0.95, ignore_eos=True)


def requests(count: int, depth: int | None = 0, params: SamplingParams = SAMPLED) -> list[Request]:
    """A third asks for nothing, a third for up to 20 tokens, a third for its own alone."""
    asked = []
    for i, prompt in enumerate(prompts(count)):
        wants = [{}, {"top_logprobs": 1 + i % 20}, {"logprobs": True}][i % 3]
        asked.append(Request(str(i), prompt, replace(params, **wants), 1000 + i, depth=depth))  # type: ignore[arg-type] # by name
    return asked


def assert_tells_what_was_asked(request: Request, completion: Completion) -> None:
    tops, count = completion.top_logprobs, request.params.top_logprobs
    if not request.params.tells_logprobs:
        assert tops is None
        return
    assert tops is not None
    assert len(tops) == len(completion.token_ids)
    for token, own, (ids, values) in zip(
        completion.token_ids, completion.logprobs, tops, strict=True
    ):
        assert len(ids) == len(values) == len(set(ids)) == count
        assert list(values) == sorted(values, reverse=True)
        if token in ids:
            assert values[ids.index(token)] == own
        elif count:
            assert own <= values[-1]


def test_they_are_those_of_transformers_logits(tiny_pair: TinyPair) -> None:
    from transformers import AutoModelForCausalLM

    made: Any = AutoModelForCausalLM
    model = made.from_pretrained(tiny_pair.verifier, dtype=torch.float32).eval()
    params = replace(SAMPLED, top_logprobs=5, logit_bias=((9, 30.0),), bad_token_ids=(7,))
    for i, prompt in enumerate(prompts(4)):
        got = alone(tiny_pair.verifier, prompt, params, i, "float32")
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *got.token_ids]])).logits[0, len(prompt) - 1 :]
        assert got.top_logprobs is not None
        for law, (ids, values) in zip(logits.log_softmax(-1), got.top_logprobs, strict=False):
            highest = law.topk(5).values
            assert list(values) == pytest.approx(highest.tolist(), abs=1e-4)
            assert law[list(ids)].tolist() == pytest.approx(list(values), abs=1e-4)


@pairwise(depth=[0, 2, 8, None], proposer=["right", "random"], concurrent=[1, 7, 64])
def test_they_have_the_same_bits_at_any_depth_and_in_any_company(
    tiny_pair: TinyPair, depth: int | None, proposer: str, concurrent: int
) -> None:
    folder: Path = tiny_pair.verifier if proposer == "right" else tiny_pair.draft
    asked = requests(24, depth)
    got = bench(tiny_pair.verifier, folder, max_sequences=concurrent).add(*asked).run()
    for request in asked:
        assert_tells_what_was_asked(request, got[request.request_id])
        assert_same(got[request.request_id], baseline_of(tiny_pair.verifier)(request))
    if depth and proposer == "right":
        assert sum(c.accepted for c in got.values()) > 0


@pytest.mark.parametrize("depth", [0, 8], ids=lambda d: f"depth{d}")
def test_preemption_keeps_them(tiny_pair: TinyPair, depth: int) -> None:
    asked = requests(24, depth)
    one = bench(tiny_pair.verifier, tiny_pair.verifier, num_blocks=9, draft_blocks=60)
    got = one.add(*asked).run()
    assert one.blocks.preempted > 0
    for request in asked:
        assert_tells_what_was_asked(request, got[request.request_id])
        assert_same(got[request.request_id], baseline_of(tiny_pair.verifier)(request))


def test_asking_changes_nothing_else(tiny_pair: TinyPair) -> None:
    plain = [replace(r, params=SAMPLED) for r in requests(12, 4)]
    before = bench(tiny_pair.verifier, tiny_pair.verifier).add(*plain).run()
    after = bench(tiny_pair.verifier, tiny_pair.verifier).add(*requests(12, 4)).run()
    for name, completion in after.items():
        assert completion.token_ids == before[name].token_ids
        assert completion.logprobs == before[name].logprobs


@pytest.mark.parametrize("depth", [0, 4, 8], ids=lambda d: f"depth{d}")
@pytest.mark.parametrize("by", ["token", "string"])
def test_a_stop_inside_an_accepted_block_cuts_them_alike(
    tiny_pair: TinyPair, by: str, depth: int
) -> None:
    params = replace(SAMPLED, top_logprobs=3)
    cut = 0
    for i, prompt in enumerate(prompts(10)):
        truth = alone(tiny_pair.verifier, prompt, params, i, "float32")
        stops = {"token": {"stop_token_ids": truth.token_ids[5:6]}, "string": {"stop": ("e", "A")}}
        stopping = replace(params, **stops[by])  # type: ignore[arg-type] # by name
        request = Request(
            "r", prompt, stopping, i, truth.token_ids, depth, watch_text=watch_text(stopping)
        )
        got = bench(tiny_pair.verifier).add(request).run()["r"]
        assert_tells_what_was_asked(request, got)
        assert truth.top_logprobs is not None
        assert got.top_logprobs == truth.top_logprobs[: len(got.token_ids)]
        cut += got.finish_reason is FinishReason.STOP
    assert cut >= (10 if by == "token" else 1)


def test_the_definition_gives_the_same_tokens_in_the_engine(tiny_pair: TinyPair) -> None:
    asked = requests(12, 4)
    one = bench(tiny_pair.verifier, tiny_pair.draft)
    one.engine._sampler = replace(
        one.engine._sampler, name="torch", verify=reference.verify, sample=reference.sample
    )
    got = one.add(*asked).run()
    for request in asked:
        completion = got[request.request_id]
        assert_tells_what_was_asked(request, completion)
        truth = baseline_of(tiny_pair.verifier)(request)
        assert completion.token_ids == truth.token_ids
        for (ids, values), (others, expected) in zip(
            completion.top_logprobs or (), truth.top_logprobs or (), strict=True
        ):
            assert ids == others
            assert values == pytest.approx(expected, abs=1e-5)


def test_what_never_begins_or_is_cancelled_tells_as_much_as_there_is(tiny_pair: TinyPair) -> None:
    one = bench(tiny_pair.verifier)
    params = replace(SAMPLED, top_logprobs=2)
    one.add(Request("bad", (VOCAB,), params, 1), Request("cut", (1, 2), params, 1, depth=0))
    for _ in range(3):
        one.step()
    one.keep(one.engine.cancel(lambda request: request.request_id == "cut"))
    assert one.finished["bad"].error is not None
    assert one.finished["bad"].top_logprobs == ()
    cut = one.finished["cut"]
    assert len(cut.top_logprobs or ()) == len(cut.token_ids) == 3


def test_nothing_is_made_for_those_who_do_not_ask() -> None:
    def row(**wants: Any) -> Sequence:
        request = Request("r", (1, 2), SamplingParams(**wants), 1)
        return Sequence(request, frozenset(), max_length=50)

    cpu = torch.device("cpu")
    assert top_rows(Columns([row(), row(logprobs=True)], cpu), [1, 4], cpu) is None
    asking = [row(), row(top_logprobs=3), row(top_logprobs=7), row()]
    wanted = top_rows(Columns(asking, cpu), [2, 1, 3, 1], cpu)
    assert wanted is not None
    assert (wanted.rows.tolist(), wanted.count) == ([2, 3, 4, 5], 7)
