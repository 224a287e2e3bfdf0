"""Several passes in one call in C, since the overhead of a call would outweigh a small model."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specbatch.kernels.decoder import cpu as decoder
from specbatch.kernels.decoder.contract import DecoderBatch
from specbatch.kernels.multi_step.contract import Generated, Stops
from specbatch.kernels.verify import cpu as verify
from specbatch.kernels.verify.contract import SamplingRows

_WORDS_PER_SEQUENCE = 7  # five arrays of 64 bits and up to four of 32, see csrc/multi_step.h


def draft(
    model: decoder.Decoder,
    batch: DecoderBatch,
    depths: list[int],
    counters: Tensor,
    sampling: SamplingRows,
) -> Tensor:
    """As `reference.draft`, with the decoder itself in place of its forward function."""
    count, steps = len(depths), depths[0]
    active = np.array([sum(d > step for d in depths) for step in range(steps)], dtype=np.int32)
    drafts = torch.full((steps, count), -1, dtype=torch.int64)
    first = _First(model, batch, steps, counters, sampling)
    failed = model.kernels.draft(
        *first.arguments,
        *(steps, active.ctypes.data, first.space.ctypes.data, drafts.data_ptr(), first.threads),
    )
    if failed:
        raise MemoryError(f"no memory to draft {steps} tokens of {count} sequences")
    return drafts


def generate(
    model: decoder.Decoder,
    batch: DecoderBatch,
    limits: Sequence[int],
    stops: Stops,
    counters: Tensor,
    sampling: SamplingRows,
) -> Generated:
    """As `reference.generate`, with the decoder itself in place of its forward function."""
    count, passes = len(limits), max(limits)
    # Rows move up as sequences end; the caller's stay.
    own = replace(
        sampling,
        temperature=sampling.temperature.clone(),
        top_p=sampling.top_p.clone(),
        min_p=sampling.min_p.clone(),
        top_k=sampling.top_k.clone(),
    )
    first = _First(model, batch, passes, counters, own, torch.empty(count, dtype=torch.float32))
    most, made = np.array(limits, dtype=np.int32), np.zeros(count, dtype=np.int32)
    tokens = np.empty((passes, count), dtype=np.int64)
    logprobs = np.empty((passes, count), dtype=np.float32)
    failed = model.kernels.generate(
        *first.arguments,
        *(most.ctypes.data, stops.starts.ctypes.data, stops.ids.ctypes.data),
        *(first.space.ctypes.data, tokens.ctypes.data, logprobs.ctypes.data),
        *(made.ctypes.data, first.threads),
    )
    if failed:
        raise MemoryError(f"no memory for {passes} passes of {count} sequences")
    return Generated(tokens.T.tolist(), logprobs.T.tolist(), made.tolist())


class _First:
    """The C side's view of the first of several passes, which it moves on from pass to pass."""

    def __init__(
        self,
        model: decoder.Decoder,
        batch: DecoderBatch,
        passes: int,
        counters: Tensor,
        sampling: SamplingRows,
        logprobs: Tensor | None = None,
    ) -> None:
        contexts = batch.ragged.context_lens
        count = len(contexts)
        self.threads = torch.get_num_threads()
        logits = torch.empty(count, model.vocab_size, dtype=torch.float32)
        tokens = torch.empty(count, dtype=torch.int64)
        of_pass, by_pass = model.arguments(batch, logits, max(contexts) + passes - 1)
        of_rows, by_rows = verify.arguments_of(
            logits, counters.clone(), sampling, min(self.threads, count), tokens, logprobs
        )
        self.arguments = byref(model.model), byref(of_pass), byref(of_rows)
        self._held = by_pass, by_rows
        # Room for what later passes read, with the next positions and the sequences filled in.
        self.space = np.zeros((_WORDS_PER_SEQUENCE, count), dtype=np.int64)
        self.space[4] = contexts
        self.space[5:].reshape(-1).view(np.int32)[:count] = np.arange(count)
