"""Penalties, biases, bad words and stop strings: as defined, and the same at any depth."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.decoding import (
    VOCAB,
    assert_counts_add_up,
    assert_same,
    baseline_of,
    bench,
    prompts,
    watch_text,
)

from specbatch.kernels.verify.reference import process
from specbatch.pipeline.engines.contract import Request
from specbatch.pipeline.engines.exact.sampling.sampling import sampling_rows
from specbatch.pipeline.engines.state.penalties import Adjuster, BadWords
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.schemas.records import FinishReason, SamplingParams
from support.grids import pairwise
from support.models import TinyPair

NEW_TOKENS = 24


# --- the definition -----------------------------------------------------------------------------
def naive_scores(logits: list[float], request: Request, output: list[int]) -> list[float]:
    """Penalties, bias and bad words in Python, the whole context looked at."""
    p, prompt = request.params, list(request.prompt_ids)
    context, scores = prompt + output, list(logits)
    for token, x in enumerate(logits):
        if token in context:
            x = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
        count = output.count(token)
        x -= p.presence_penalty * (count > 0) + p.frequency_penalty * count
        x += dict(p.logit_bias).get(token, 0.0)
        scores[token] = x
    for token in p.bad_token_ids:
        scores[token] = float("-inf")
    for *before, last in p.bad_words:
        if not before or context[-len(before) :] == before:
            scores[last] = float("-inf")
    return scores


def mixed(seed: int) -> SamplingParams:
    """All parameters at once, in many combinations. Few likely tokens, so that they repeat."""
    generator = random.Random(seed)
    some = generator.choice
    return SamplingParams(
        max_tokens=NEW_TOKENS,
        min_tokens=some([0, 0, 3]),
        temperature=some([0.0, 0.3, 0.8]),
        top_k=some([0, 8]),
        top_p=some([1.0, 0.9]),
        min_p=some([0.0, 0.02]),
        repetition_penalty=some([1.0, 1.3, 0.8]),
        presence_penalty=some([0.0, 0.7, -1.5]),
        frequency_penalty=some([0.0, 0.4, -0.6]),
        logit_bias=tuple(
            (token, generator.uniform(-6, 6))
            for token in generator.sample(range(VOCAB), some([0, 12]))
        ),
        bad_token_ids=tuple(generator.sample(range(VOCAB), some([0, 30]))),
        bad_words=tuple(
            tuple(generator.randrange(VOCAB) for _ in range(some([1, 2, 2, 3])))
            for _ in range(some([0, 200]))
        ),
        stop=some([(), ("e", "qz"), ("th", "é", "\x01\x02")]),
        ignore_eos=True,
        top_logprobs=(0, 5, 0, 20)[seed % 4],
    )


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_the_naive_ones_with_the_draft_as_context(seed: int) -> None:
    generator = random.Random(seed)
    params = replace(mixed(seed), temperature=0.0, min_tokens=0)
    prompt = tuple(generator.randrange(40) for _ in range(30))
    request = Request("r", prompt, params, seed=1)
    row = Sequence(request, frozenset(), max_length=500)
    for _ in range(40):
        tokens = [generator.randrange(60) for _ in range(generator.randint(1, 3))]
        row.accept([], [tokens[0]], [0.0])
        draft = [generator.randrange(60) for _ in range(generator.randint(0, 5))]
        first = generator.choice([0, 0, len(draft)])
        count = len(draft) + 1 - first
        logits = torch.randn(count, VOCAB) * 3
        sampling, _ = sampling_rows([row], [count], logits.device, [draft], first)
        got = process(logits, sampling)
        for j in range(count):
            output = row.output + draft[: first + j]
            expected = torch.tensor(naive_scores(logits[j].tolist(), request, output))
            torch.testing.assert_close(got[j], expected, rtol=1e-5, atol=1e-4)


def test_what_is_not_asked_for_costs_nothing() -> None:
    row = Sequence(Request("r", (1, 2), SamplingParams(), seed=1), frozenset(), max_length=50)
    assert row.adjuster is None
    assert row.bad_words is None
    sampling, _ = sampling_rows([row], [3], torch.device("cpu"), [[4, 5]])
    assert sampling.adjust is None
    assert not sampling.forbidden_rows.numel()


def test_rows_leave_the_books_as_they_were() -> None:
    adjuster = Adjuster(SamplingParams(frequency_penalty=0.5, repetition_penalty=1.2), (3, 4))
    for token in (*range(200), 7, 7):
        adjuster.append(token)
    before = adjuster.rows([], 0, 1)[0]
    adjuster.rows([7, 250, 7, 251, 250], 0, 6)
    adjuster.rows([7, 250, 7], 3, 1)
    after = adjuster.rows([], 0, 1)[0]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert len(before[0]) == 200


def test_bad_words_longer_than_the_context_do_not_match() -> None:
    words = BadWords(SamplingParams(bad_words=((1, 2, 3), (2, 9))))
    assert [list(ids) for ids in words.rows([2], [], 0, 1)] == [[9]]
    assert [list(ids) for ids in words.rows([1], [2, 5], 0, 3)] == [[], [3, 9], []]


# --- against transformers -----------------------------------------------------------------------
@pytest.mark.parametrize("depth", [0, 4], ids=lambda d: f"depth{d}")
@pytest.mark.parametrize("penalty", [1.3, 0.9])
def test_greedy_with_repetition_penalty_is_that_of_generate(
    tiny_pair: TinyPair, depth: int, penalty: float
) -> None:
    from transformers import AutoModelForCausalLM

    made: Any = AutoModelForCausalLM
    model = made.from_pretrained(tiny_pair.verifier, dtype=torch.float32).eval()
    params = SamplingParams(
        max_tokens=30, repetition_penalty=penalty, bad_words=((5,), (6, 7)), bad_token_ids=(8,)
    )
    asked = [Request(str(i), p, params, 1, depth=depth) for i, p in enumerate(prompts(4))]
    got = bench(tiny_pair.verifier, tiny_pair.draft).add(*asked).run()
    for request in asked:
        ids = torch.tensor([request.prompt_ids])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False,
            repetition_penalty=penalty, bad_words_ids=[[5], [6, 7], [8]],
        )  # fmt: skip
        assert got[request.request_id].token_ids == tuple(out[0, ids.shape[1] :].tolist())


# --- under speculation --------------------------------------------------------------------------
def mixed_requests(count: int, depth: int | None) -> list[Request]:
    asked = []
    for i, prompt in enumerate(prompts(count, longest=40)):
        params = mixed(i)
        asked.append(
            Request(str(i), prompt, params, 1000 + i, depth=depth, watch_text=watch_text(params))
        )
    return asked


@pairwise(depth=[0, 1, 4, None], proposer=["right", "random"], concurrent=[1, 12])
def test_all_parameters_mixed_are_the_same_at_any_depth(
    tiny_pair: TinyPair, depth: int | None, proposer: str, concurrent: int
) -> None:
    folder: Path = tiny_pair.verifier if proposer == "right" else tiny_pair.draft
    asked = mixed_requests(12, depth)
    one = bench(tiny_pair.verifier, folder, max_sequences=concurrent)
    got = one.add(*asked).run()
    for request in asked:
        completion = got[request.request_id]
        assert completion.error is None
        assert_same(completion, baseline_of(tiny_pair.verifier)(request))
        assert not {*completion.token_ids} & {*request.params.bad_token_ids}
    one.assert_all_blocks_are_free()
    if depth and proposer == "right":  # the draft model counts what it drafted as context as well
        assert sum(c.accepted for c in got.values()) == sum(c.proposed for c in got.values()) > 0


@pytest.mark.parametrize("depth", [0, 1, 4, 8], ids=lambda d: f"depth{d}")
def test_a_stop_string_inside_an_accepted_block_cuts_it(tiny_pair: TinyPair, depth: int) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.8, ignore_eos=True)
    met = 0
    for i, prompt in enumerate(prompts(10)):
        plain = Request("r", prompt, params, seed=i)
        truth = baseline_of(tiny_pair.verifier)(plain).token_ids
        text = [chr(t) if 33 <= t < 127 else "" for t in truth]
        at = next((n for n in range(4, 30) if text[n] and text[n] not in text[:n]), None)
        if at is None:
            continue
        met += 1
        stopping = replace(params, stop=(text[at],))
        request = replace(
            plain, params=stopping, watch_text=watch_text(stopping), draft_ids=truth, depth=depth
        )
        got = bench(tiny_pair.verifier).add(request).run()["r"]
        assert_same(got, baseline_of(tiny_pair.verifier)(replace(request, draft_ids=())))
        assert len(got.token_ids) <= at + 1  # or earlier, inside a token of several letters
        assert got.token_ids == truth[: len(got.token_ids)]
        assert got.finish_reason is FinishReason.STOP
        assert got.verifier_passes == -(-len(got.token_ids) // (depth + 1))
        assert_counts_add_up(got)
    assert met > 3


# --- refused ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (SamplingParams(logit_bias=((VOCAB, 1.0),)), "sampling names a token outside"),
        (SamplingParams(bad_token_ids=(-1,)), "sampling names a token outside"),
        (SamplingParams(bad_words=((1, VOCAB),)), "sampling names a token outside"),
        (SamplingParams(bad_token_ids=tuple(range(VOCAB))), "sampling forbids every token"),
        (SamplingParams(stop=("x",)), "stop strings need a detokenizer"),
    ],
)
def test_what_cannot_be_sampled_is_answered(
    tiny_pair: TinyPair, params: SamplingParams, reason: str
) -> None:
    good = Request("good", (1, 2), SamplingParams(max_tokens=3), seed=1)
    got = bench(tiny_pair.verifier).add(replace(good, request_id="r", params=params), good).run()
    assert got["r"].finish_reason is FinishReason.ERROR
    assert reason in (got["r"].error or "")
    assert_same(got["good"], baseline_of(tiny_pair.verifier)(good))
