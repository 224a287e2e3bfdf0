"""Drafting as it is defined: a pass, a token per sequence, and the token fed to the next pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specbatch.kernels.decoder.contract import BLOCK_SIZE, DecoderBatch
from specbatch.kernels.paged_attention.contract import RaggedBatch
from specbatch.kernels.verify.contract import SamplingRows
from specbatch.kernels.verify.reference import sample


def draft(
    forward: Callable[[DecoderBatch], Tensor],
    batch: DecoderBatch,
    depths: list[int],
    counters: Tensor,
    sampling: SamplingRows,
) -> Tensor:
    """Draft tokens [deepest, num_seqs] int64; -1 behind a sequence's depth.

    `forward` feeds a batch and gives its logits. `batch` feeds what is not fed yet of every
    sequence and wants the logits of each one's last token; `depths` (1 or more) do not rise. The
    block tables have room for what is drafted. `counters` and `sampling` are of the first draft
    token; nothing in `sampling` may depend on the position.
    """
    drafts = torch.full((depths[0], len(depths)), -1, dtype=torch.int64)
    contexts = list(batch.ragged.context_lens)
    for step in range(depths[0]):
        active = sum(depth > step for depth in depths)
        logits = forward(batch)[:active]
        at = counters[:active] + torch.tensor([0, step])
        drafts[step, :active] = sample(logits, at, sampling.at(slice(active)))
        going_on = sum(depth > step + 1 for depth in depths)
        positions = torch.tensor(contexts[:going_on]) + step
        tables = batch.ragged.block_tables[:going_on]
        slots = [
            table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
            for table, at in zip(tables, positions.tolist(), strict=True)
        ]
        batch = DecoderBatch(
            drafts[step, :going_on].clone(),
            positions,
            RaggedBatch(
                query_starts=list(range(going_on + 1)),
                context_lens=(positions + 1).tolist(),
                block_tables=tables,
                slots=torch.tensor(slots, dtype=torch.int64),
            ),
            torch.arange(going_on),
        )
    return drafts


def repeatable(sampling: SamplingRows) -> bool:
    """Whether nothing in the parameters depends on the position, as `draft` asks."""
    return sampling.adjust is None and sampling.allowed is None and not len(sampling.forbidden_rows)
