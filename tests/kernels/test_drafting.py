"""Drafting in one native call equals the definition, pass by pass."""

from __future__ import annotations

from dataclasses import replace

import torch

from specbatch.kernels.decoder.contract import BLOCK_SIZE, DecoderBatch
from specbatch.kernels.drafting import cpu, reference
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
