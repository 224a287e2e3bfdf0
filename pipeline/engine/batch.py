"""One forward pass: which tokens of which sequences, and the tensors made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specbatch.kernels.decoder.contract import DecoderBatch
from specbatch.kernels.paged_attention.contract import RaggedBatch
from specbatch.pipeline.engine.blocks import TRASH_BLOCK, KvState
from specbatch.pipeline.engine.transfer import to_device


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one sequence; logits are wanted for the last `logit_rows` of them."""

    kv: KvState  # already grown to hold kv.length + len(token_ids) tokens
    token_ids: Sequence[int]
    logit_rows: int


def build_batch(
    chunks: Sequence[Chunk],
    block_size: int,
    padded: Callable[[int], int],
    device: torch.device,
    padded_rows: Callable[[int], int] | None = None,
) -> DecoderBatch:
    """Lay the chunks out behind one another, then pad the tokens as `padded` says.

    Logit rows are padded as `padded_rows` says, or as tokens are.
    """
    lengths = np.array([len(c.token_ids) for c in chunks], dtype=np.int64)
    cached = np.array([c.kv.length for c in chunks], dtype=np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    num_tokens = int(starts[-1])
    width = padded(num_tokens)

    # 1) Tokens and their positions.
    input_ids = np.zeros(width, dtype=np.int64)
    input_ids[:num_tokens] = np.concatenate([np.asarray(c.token_ids, np.int64) for c in chunks])
    positions = np.zeros(width, dtype=np.int64)
    within = np.arange(num_tokens) - np.repeat(starts[:-1], lengths)
    positions[:num_tokens] = np.repeat(cached, lengths) + within

    # 2) Where their KV goes; padding goes to the trash block.
    slots = np.full(width, TRASH_BLOCK * block_size, dtype=np.int64)
    for chunk, start, end in zip(chunks, starts[:-1], starts[1:], strict=True):
        at = positions[start:end]
        blocks = np.asarray(chunk.kv.blocks, dtype=np.int64)
        slots[start:end] = blocks[at // block_size] * block_size + at % block_size

    # 3) The rows whose logits are wanted.
    rows = [
        np.arange(end - chunk.logit_rows, end)
        for chunk, end in zip(chunks, starts[1:], strict=True)
    ]
    num_rows = sum(len(r) for r in rows)
    logit_index = np.zeros((padded_rows or padded)(num_rows) if num_rows else 0, dtype=np.int64)
    logit_index[:num_rows] = np.concatenate(rows)

    return DecoderBatch(
        ids=to_device(input_ids, device),
        positions=to_device(positions, device),
        ragged=RaggedBatch(
            query_starts=starts.tolist(),
            context_lens=(cached + lengths).tolist(),
            block_tables=[c.kv.blocks for c in chunks],
            slots=to_device(slots, device),
        ),
        logit_rows=to_device(logit_index, device),
    )
