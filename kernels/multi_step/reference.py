"""Several passes as they are defined: a pass, a token per sequence, each fed to the next pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specbatch.kernels.decoder.contract import BLOCK_SIZE, DecoderBatch
from specbatch.kernels.multi_step.contract import Generated, Stops
from specbatch.kernels.paged_attention.contract import RaggedBatch
from specbatch.kernels.verify.contract import PLACEHOLDER, SamplingRows
from specbatch.kernels.verify.reference import sample, verify


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
        positions = [context + step for context in contexts[:going_on]]
        tables = batch.ragged.block_tables[:going_on]
        batch = _next(tables, positions, drafts[step, :going_on].clone())
    return drafts


def generate(
    forward: Callable[[DecoderBatch], Tensor],
    batch: DecoderBatch,
    limits: Sequence[int],
    stops: Stops,
    counters: Tensor,
    sampling: SamplingRows,
) -> Generated:
    """Up to `limits[i]` tokens of each sequence, one per pass, and their log-probabilities.

    A sequence ends earlier with one of its stop tokens, or with logits that are NaN. `forward`,
    `batch`, `counters` and `sampling` are as `draft` has them, for tokens that are decided.
    """
    count = len(limits)
    tokens: list[list[int]] = [[] for _ in limits]
    logprobs: list[list[float]] = [[] for _ in limits]
    tables, contexts = batch.ragged.block_tables, list(batch.ragged.context_lens)
    running = list(range(count))
    while running:
        rows, at = torch.tensor(running), torch.tensor([len(tokens[i]) for i in running])
        bonus = torch.full((len(running),), PLACEHOLDER)
        verdict = verify(
            forward(batch),
            bonus,
            torch.arange(len(running) + 1),
            counters[rows] + torch.stack((torch.zeros_like(at), at), 1),
            sampling.at(rows),
        )
        for i, token, logprob in zip(
            running, verdict.tokens.tolist(), verdict.logprobs.tolist(), strict=True
        ):
            tokens[i].append(token)
            logprobs[i].append(logprob)
        running = [
            i
            for i in running
            if len(tokens[i]) < limits[i]
            and not math.isnan(logprobs[i][-1])
            and tokens[i][-1] not in stops.ids[stops.starts[i] : stops.starts[i + 1]]
        ]
        fed = torch.tensor([tokens[i][-1] for i in running], dtype=torch.int64)
        positions = [contexts[i] + len(tokens[i]) - 1 for i in running]
        batch = _next([tables[i] for i in running], positions, fed)
    return Generated(tokens, logprobs, list(map(len, tokens)))


def _next(tables: list[list[int]], positions: list[int], ids: Tensor) -> DecoderBatch:
    """A pass over one token of each sequence."""
    slots = [
        table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        for table, at in zip(tables, positions, strict=True)
    ]
    return DecoderBatch(
        ids,
        torch.tensor(positions, dtype=torch.int64),
        RaggedBatch(
            query_starts=list(range(len(tables) + 1)),
            context_lens=[at + 1 for at in positions],
            block_tables=tables,
            slots=torch.tensor(slots, dtype=torch.int64),
        ),
        torch.arange(len(tables)),
    )


def repeatable(sampling: SamplingRows) -> bool:
    """Whether nothing in the parameters depends on the position, as `draft` asks."""
    return sampling.adjust is None and sampling.allowed is None and not len(sampling.forbidden_rows)
