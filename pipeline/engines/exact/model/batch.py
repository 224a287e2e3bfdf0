"""One forward pass: which tokens of which sequences, the tensors made of them, and what returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specbatch.kernels.decoder.contract import DecoderBatch
from specbatch.kernels.paged_attention.contract import RaggedBatch, to_device
from specbatch.kernels.verify.contract import Verdict
from specbatch.pipeline.engines.state.kv_blocks import TRASH_BLOCK, KvState


class Chunk(NamedTuple):
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
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []  # where their KV goes
    rows: list[int] = []  # whose logits are wanted
    starts, contexts = [0], []
    for kv, tokens, logit_rows in chunks:
        assert kv.length >= kv.sealed * block_size, "sealed blocks are final"
        begin, end, blocks = kv.length, kv.length + len(tokens), kv.blocks
        ids += tokens
        positions += range(begin, end)
        slots += [
            blocks[at // block_size] * block_size + at % block_size for at in range(begin, end)
        ]
        rows += range(len(ids) - logit_rows, len(ids))
        starts.append(len(ids))
        contexts.append(end)
    width = padded(len(ids))
    num_rows = (padded_rows or padded)(len(rows)) if rows else 0
    return DecoderBatch(
        ids=_tensor(ids, width, 0, device),
        positions=_tensor(positions, width, 0, device),
        ragged=RaggedBatch(
            query_starts=starts,
            context_lens=contexts,
            block_tables=[c.kv.blocks for c in chunks],
            slots=_tensor(slots, width, TRASH_BLOCK * block_size, device),
        ),
        logit_rows=_tensor(rows, num_rows, 0, device),
    )


def _tensor(values: list[int], width: int, padding: int, device: torch.device) -> Tensor:
    """int64 [width] on the device: the values, then padding."""
    values += [padding] * (width - len(values))
    return to_device(np.array(values, dtype=np.int64), device)


def to_host(verdict: Verdict) -> tuple[list[int], list[float], list[int]]:
    """(tokens, log-probabilities, accepted): the one place where a step waits for its device."""
    parts = (verdict.tokens, verdict.logprobs, verdict.accepted)
    if verdict.tokens.device.type == "cpu":
        tokens, logprobs, accepted = (part.tolist() for part in parts)
        return tokens, logprobs, accepted
    # One copy; float64 holds a float32 as it is, and its bits pass for an integer.
    rows = verdict.tokens.shape[0]
    bits = verdict.logprobs.double().view(torch.int64)
    joined = torch.cat((verdict.tokens, bits, verdict.accepted)).cpu().numpy()
    logprobs = joined[rows : 2 * rows].view(np.float64).tolist()
    return joined[:rows].tolist(), logprobs, joined[2 * rows :].tolist()
