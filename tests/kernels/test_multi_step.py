"""Several passes in one native call equal the definition, pass by pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from specbatch.kernels.decoder.contract import BLOCK_SIZE, DecoderBatch
from specbatch.kernels.multi_step import cpu, reference
from specbatch.kernels.multi_step.contract import Stops
from specbatch.kernels.verify.contract import SamplingRows
from specbatch.pipeline.engines.exact.model.batch import Chunk, build_batch
from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.engines.state.kv_blocks import BlockManager, KvState
from support.demo import DRAFT
from support.grids import pairwise

BLOCKS = 64


def rows(count: int, temperature: float) -> SamplingRows:
    return SamplingRows(
        temperature=torch.full((count,), temperature),
        top_k=torch.tensor([0, 20] * count)[:count],
        top_p=torch.tensor([0.9, 1.0, 0.5] * count)[:count],
        min_p=torch.zeros(count),
        forbidden_rows=torch.empty(0, dtype=torch.int64),
        forbidden_tokens=torch.empty(0, dtype=torch.int64),
        any_sampled=temperature > 0,
        any_top_k=True,
        any_top_p=True,
        any_min_p=False,
    )


@pairwise(
    dtype=["bfloat16", "float32"], temperature=[0.0, 0.9], depths=[[4], [3, 3, 3], [8, 5, 5, 1, 1]]
)
def test_one_call_is_pass_after_pass(dtype: str, temperature: float, depths: list[int]) -> None:
    native = load_model(inspect_model(str(DRAFT)), dtype).native
    assert native is not None, "the demo's draft model runs natively"
    drafts = []
    for drafting in ("reference", "cpu"):
        decoder = cpu.decoder.Decoder(*native, BLOCKS)
        batch = feeds(depths)
        counters = torch.stack((torch.arange(len(depths)) + 7, torch.arange(len(depths))), 1)
        sampling = rows(len(depths), temperature)
        if drafting == "cpu":
            drafts.append(cpu.draft(decoder, batch, depths, counters, sampling))
        else:
            drafts.append(reference.draft(decoder.forward, batch, depths, counters, sampling))
        assert counters[:, 1].tolist() == list(range(len(depths))), "the caller's stay"
    assert drafts[0].tolist() == drafts[1].tolist()
    for i, depth in enumerate(depths):
        assert (drafts[1][:depth, i] >= 0).all()
        assert (drafts[1][depth:, i] == -1).all()


@pairwise(
    dtype=["bfloat16", "float32"], temperature=[0.0, 0.9], limits=[[4], [3, 6, 1], [2, 8, 8, 5, 1]]
)
def test_generating_ends_each_sequence_by_itself(
    dtype: str, temperature: float, limits: list[int]
) -> None:
    native = load_model(inspect_model(str(DRAFT)), dtype).native
    assert native is not None, "the demo's draft model runs natively"
    sampling, count = rows(len(limits), temperature), len(limits)
    given = [p.clone() for p in (sampling.temperature, sampling.top_k, sampling.top_p)]
    counters = torch.stack((torch.arange(count) + 7, torch.arange(count)), 1)

    def run(stops: Stops) -> list[tuple[list[int], list[float]]]:
        found = []
        for generating in ("reference", "cpu"):
            decoder, batch = cpu.decoder.Decoder(*native, BLOCKS), feeds(limits)
            rest = (batch, limits, stops, counters, sampling)
            if generating == "cpu":
                made = cpu.generate(decoder, *rest)
            else:
                made = reference.generate(decoder.forward, *rest)
            found.append([(t[:n], p[:n]) for t, p, n in zip(*made, strict=True)])
        for (tokens, logprobs), (own, own_logprobs) in zip(*found, strict=True):
            assert tokens == own
            # Torch adds in another order; bits are compared with passes of the same sampler.
            assert logprobs == pytest.approx(own_logprobs, abs=1e-5)
        return found[1]

    def stops_of(ids: list[list[int]]) -> Stops:
        starts = np.cumsum([0, *map(len, ids)], dtype=np.int64)
        return Stops(starts, np.array([token for of in ids for token in of], dtype=np.int64))

    whole = run(stops_of([[]] * count))
    assert [len(tokens) for tokens, _ in whole] == limits
    # Each sequence's second token is a stop token of its own, and of nobody else.
    stopped = run(stops_of([[2, *tokens[1:2]] for tokens, _ in whole]))
    for (tokens, logprobs), (all_tokens, all_logprobs) in zip(stopped, whole, strict=True):
        end = all_tokens.index(all_tokens[1]) + 1 if len(all_tokens) > 1 else 1
        assert (tokens, logprobs) == (all_tokens[:end], all_logprobs[:end])
    assert counters[:, 1].tolist() == list(range(count)), "the caller's stay"
    for before, after in zip(
        given, (sampling.temperature, sampling.top_k, sampling.top_p), strict=True
    ):
        assert torch.equal(before, after), "the caller's stay"


def test_c_gets_room_for_float32_whatever_torchs_default_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Transformers changes the default for as long as it loads a model, in whatever thread."""
    native = load_model(inspect_model(str(DRAFT)), "float32").native
    assert native is not None, "the demo's draft model runs natively"
    decoder, batch, sampling = cpu.decoder.Decoder(*native, BLOCKS), feeds([3, 2]), rows(2, 0.9)
    stops = Stops(np.zeros(3, dtype=np.int64), np.empty(0, dtype=np.int64))
    given: list[torch.Tensor | None] = []
    arguments_of = cpu.verify.arguments_of

    def noted(*arguments: Any) -> Any:
        given.append(arguments[-1])
        return arguments_of(*arguments)

    monkeypatch.setattr(cpu.verify, "arguments_of", noted)
    torch.set_default_dtype(torch.bfloat16)
    try:
        cpu.generate(decoder, batch, [3, 2], stops, torch.zeros(2, 2, dtype=torch.int64), sampling)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [logprobs.dtype for logprobs in given if logprobs is not None] == [torch.float32]


def feeds(depths: list[int]) -> DecoderBatch:
    """The first pass: prompts of different lengths, one longer than a block."""
    blocks, generator = BlockManager(BLOCKS, BLOCK_SIZE, False), torch.Generator().manual_seed(3)
    chunks = []
    for i, depth in enumerate(depths):
        tokens = torch.randint(3, 2000, (5 + 13 * i,), generator=generator).tolist()
        kv = KvState()
        blocks.grow(kv, len(tokens) + depth)
        chunks.append(Chunk(kv, tokens, 1))
    return build_batch(chunks, BLOCK_SIZE, lambda n: n, torch.device("cpu"))


def test_what_depends_on_the_position_is_not_drafted_in_one_call() -> None:
    plain = rows(2, 0.5)
    assert reference.repeatable(plain)
    forbidden = replace(plain, forbidden_rows=torch.tensor([0]), forbidden_tokens=torch.tensor([5]))
    assert not reference.repeatable(forbidden)
