"""Drafting in C: one call for all tokens of a draft, since the overhead of a call would outweigh a
small model."""

from __future__ import annotations

from ctypes import byref

import numpy as np
import torch
from torch import Tensor

from specbatch.kernels.decoder import cpu as decoder
from specbatch.kernels.decoder.contract import DecoderBatch
from specbatch.kernels.verify import cpu as verify
from specbatch.kernels.verify.contract import SamplingRows

_WORDS_PER_SEQUENCE = 6  # five arrays of 64 bits and two of 32, see csrc/drafting.h


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
    threads = torch.get_num_threads()
    logits = torch.empty(count, model.vocab_size, dtype=torch.float32)
    # Every pass moves the counters on; the caller's stay.
    tokens, own_counters = torch.empty(count, dtype=torch.int64), counters.clone()
    longest = max(batch.ragged.context_lens) + steps - 1
    of_pass, held_by_pass = model.arguments(batch, logits, longest)
    of_rows, held_by_rows = verify.arguments_of(logits, own_counters, sampling, threads, tokens)
    following = np.zeros((_WORDS_PER_SEQUENCE, count), dtype=np.int64)
    following[4] = batch.ragged.context_lens
    failed = model.kernels.draft(
        byref(model.model),
        byref(of_pass),
        byref(of_rows),
        steps,
        active.ctypes.data,
        following.ctypes.data,
        drafts.data_ptr(),
        threads,
    )
    del held_by_pass, held_by_rows
    if failed:
        raise MemoryError(f"no memory to draft {steps} tokens of {count} sequences")
    return drafts
