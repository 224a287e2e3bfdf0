"""The engine writes what the verifier alone would have written, whatever drafts and neighbours."""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.decoding import VOCAB, alone, assert_same, baseline_of, bench, prompts

from specbatch.kernels.verify.reference import sample
from specbatch.pipeline.engines.contract import Request
from specbatch.pipeline.engines.exact.sampling.sampling import sampling_rows
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.schemas.records import FinishReason, SamplingParams
from support.grids import pairwise
from support.models import TinyPair

GREEDY = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95)
DEPTHS = [0, 1, 4, 8, None]


@lru_cache(maxsize=2)
def transformers_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@lru_cache(maxsize=2)
def generated(folder: Path) -> dict[str, tuple[int, ...]]:
    """What transformers writes for each of ten greedy requests."""
    model, written = transformers_model(folder), {}
    for request in requests(GREEDY, 10):
        ids = torch.tensor([request.prompt_ids])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=GREEDY.max_tokens,
            do_sample=False,
        )
        written[request.request_id] = tuple(out[0, ids.shape[1] :].tolist())
    return written


def requests(
    params: SamplingParams, count: int, depth: int | None = None, longest: int = 70
) -> list[Request]:
    return [
        Request(str(i), prompt, params, seed=1000 + i, depth=depth)
        for i, prompt in enumerate(prompts(count, longest=longest))
    ]


def proposer_folder(pair: TinyPair, kind: str) -> Path | None:
    return {"none": None, "right": pair.verifier, "random": pair.draft}[kind]


@pytest.mark.parametrize("depth", [0, 4], ids=lambda d: f"depth{d}")
def test_greedy_outputs_are_those_of_generate(tiny_pair: TinyPair, depth: int) -> None:
    got = bench(tiny_pair.verifier, tiny_pair.draft).add(*requests(GREEDY, 10, depth)).run()
    assert {name: c.token_ids for name, c in got.items()} == generated(tiny_pair.verifier)


def test_sampled_outputs_are_those_of_the_definition(tiny_pair: TinyPair) -> None:
    """No engine, no cache, no attention of ours: the logits of transformers, token by token."""
    model = transformers_model(tiny_pair.verifier)
    for request in requests(SAMPLED, 3):
        row = Sequence(request, frozenset(), max_length=500)
        logprobs = []
        while row.num_output < SAMPLED.max_tokens:
            with torch.no_grad():
                logits = model(torch.tensor([row.tokens])).logits[0, -1:].float()
            sampling, counters = sampling_rows([row], [1], logits.device)
            row.tokens.append(int(sample(logits, counters, sampling)))
            logprobs.append(float(logits.log_softmax(-1)[0, row.tokens[-1]]))
        completion = alone(tiny_pair.verifier, request.prompt_ids, SAMPLED, request.seed, "float32")
        assert completion.token_ids == tuple(row.output)[: len(completion.token_ids)]
        assert completion.logprobs == pytest.approx(logprobs[: len(completion.logprobs)], abs=1e-4)


@pairwise(depth=DEPTHS, proposer=["none", "right", "random"], concurrent=[1, 12])
def test_sampled_outputs_do_not_depend_on_depth_proposer_or_company(
    tiny_pair: TinyPair, depth: int | None, proposer: str, concurrent: int
) -> None:
    asked = requests(SAMPLED, 12 if concurrent == 12 else 4, depth)
    one = bench(tiny_pair.verifier, proposer_folder(tiny_pair, proposer), max_sequences=concurrent)
    got = one.add(*asked).run()
    for request in asked:
        assert_same(got[request.request_id], baseline_of(tiny_pair.verifier)(request))
    one.assert_all_blocks_are_free()
    accepted = sum(c.accepted for c in got.values())
    if depth and proposer == "right":
        assert accepted == sum(c.proposed for c in got.values()) > 0
    if depth == 0 or proposer == "none":
        assert sum(c.proposed for c in got.values()) == 0


@pairwise(depth=[0, 4, None], proposer=["none", "random"], dtype=["float32", "bfloat16"])
def test_a_tiny_cache_and_short_passes_change_nothing(
    tiny_pair: TinyPair, depth: int | None, proposer: str, dtype: str
) -> None:
    """Sequences are preempted and prefilled again; prompts are fed in pieces of 13 tokens."""
    asked = requests(SAMPLED, 8, depth)
    one = bench(
        tiny_pair.verifier,
        proposer_folder(tiny_pair, proposer),
        dtype=dtype,
        num_blocks=7,
        max_batch_tokens=13,
    )
    got = one.add(*asked).run()
    for request in asked:
        assert_same(got[request.request_id], baseline_of(tiny_pair.verifier, dtype)(request))
    assert one.blocks.preempted > 0
    one.assert_all_blocks_are_free()


@pytest.mark.parametrize("depth", [1, 8], ids=lambda d: f"depth{d}")
@pytest.mark.parametrize("proposer", ["right", "random"])
def test_bfloat16_keeps_its_bits_as_well(
    tiny_pair: TinyPair, depth: int | None, proposer: str
) -> None:
    asked = requests(SAMPLED, 12, depth)
    got = (
        bench(tiny_pair.verifier, proposer_folder(tiny_pair, proposer), dtype="bfloat16")
        .add(*asked)
        .run()
    )
    for request in asked:
        assert_same(got[request.request_id], baseline_of(tiny_pair.verifier, "bfloat16")(request))


@pytest.mark.parametrize("length", [126, 127, 128, 129, 250])
def test_drafts_across_the_edge_of_a_chunk_change_nothing(tiny_pair: TinyPair, length: int) -> None:
    prompt = prompts(1, length, length)[0]
    for params in (GREEDY, SAMPLED):
        request = Request("r", prompt, params, seed=5, depth=5)
        got = bench(tiny_pair.verifier, tiny_pair.verifier).add(request).run()["r"]
        assert_same(got, baseline_of(tiny_pair.verifier)(request))


@pytest.mark.parametrize("kind", ["right", "spoilt", "random", "short", "out of the vocabulary"])
@pytest.mark.parametrize("depth", [4, None], ids=["depth4", "depth-auto"])
def test_pregenerated_blocks_change_nothing(
    tiny_pair: TinyPair, kind: str, depth: int | None
) -> None:
    baseline = baseline_of(tiny_pair.verifier)
    asked = []
    for i, plain in enumerate(requests(SAMPLED, 12)):
        truth = list(baseline(plain).token_ids)
        block = {
            "right": truth,
            "spoilt": [7 if at % 5 == 3 else token for at, token in enumerate(truth)],
            "random": list(prompts(1, 30, 30, seed=i)[0]),
            "short": truth[:3],
            "out of the vocabulary": [*truth[:2], VOCAB, -1, 2**40, *truth[5:]],
        }[kind]
        asked.append(
            Request(str(i), plain.prompt_ids, SAMPLED, plain.seed, tuple(block), depth=depth)
        )
    one = bench(tiny_pair.verifier)
    got = one.add(*asked).run()
    for request in asked:
        assert_same(got[request.request_id], baseline(request))
    if kind == "right":
        assert sum(c.accepted for c in got.values()) == sum(c.proposed for c in got.values()) > 0
    one.assert_all_blocks_are_free()


def test_one_sequence_s_nan_spoils_no_other(tiny_pair: TinyPair, tmp_path: Path) -> None:
    """Token 7 is poison. Its sequences fail by themselves, and their blocks are used again."""
    model = copy.deepcopy(transformers_model(tiny_pair.verifier))
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan
    model.save_pretrained(tmp_path)
    asked = []
    for i, plain in enumerate(requests(SAMPLED, 12)):
        poison = (7,) if i % 3 == 0 else ()
        prompt = (*(token for token in plain.prompt_ids[:40] if token != 7), *poison, 9)
        asked.append(Request(plain.request_id, prompt, SAMPLED, plain.seed))
    one = bench(tmp_path, tiny_pair.draft, num_blocks=9)
    got = one.add(*asked).run()
    for request in asked:
        completion = got[request.request_id]
        expected = baseline_of(tiny_pair.verifier)(request)
        if 7 in request.prompt_ids:
            assert completion.finish_reason is FinishReason.ERROR
            assert completion.error == "the verifier's logits are NaN at token 0"
        elif 7 not in expected.token_ids:
            assert_same(completion, expected)
    assert sum(c.finish_reason is FinishReason.ERROR for c in got.values()) >= 4
    one.assert_all_blocks_are_free()


# The torch pair takes the torch path in the tests above as well.
@pytest.mark.parametrize(
    "tiny_pair", [pytest.param("torch", marks=pytest.mark.long), "native"], indirect=True
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_torch_path_keeps_its_bits_as_well(tiny_pair: TinyPair, dtype: str) -> None:
    """Models that the native pass cannot run: compared with themselves, one at a time."""
    asked = requests(SAMPLED, 8, depth=4)
    plain = bench(tiny_pair.verifier, dtype=dtype, native=False, max_sequences=1)
    expected = plain.add(*asked).run()
    for num_blocks, budget in ((1024, 2048), (8, 13)):
        one = bench(
            tiny_pair.verifier,
            tiny_pair.draft,
            dtype=dtype,
            native=False,
            num_blocks=num_blocks,
            max_batch_tokens=budget,
        )
        got = one.add(*asked).run()
        for request in asked:
            assert_same(got[request.request_id], expected[request.request_id])
        assert sum(c.proposed for c in got.values()) > 0
        one.assert_all_blocks_are_free()


def test_both_paths_write_the_same_greedy_text(tiny_pair: TinyPair) -> None:
    asked = requests(GREEDY, 6, depth=0)
    both = [bench(tiny_pair.verifier, native=native).add(*asked).run() for native in (True, False)]
    for request in asked:
        one, other = (got[request.request_id] for got in both)
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
