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
    threads = torch.get_num_threads()
    logits = torch.empty(count, model.vocab_size, dtype=torch.float32)
    # Every pass moves the counters on; the caller's stay.
    tokens, own_counters = torch.empty(count, dtype=torch.int64), counters.clone()
    longest = max(batch.ragged.context_lens) + steps - 1
    of_pass, held_by_pass = model.arguments(batch, logits, longest)
    of_rows, held_by_rows = verify.arguments_of(logits, own_counters, sampling, threads, tokens)
    space = _space(batch)
    failed = model.kernels.draft(
        byref(model.model),
        byref(of_pass),
        byref(of_rows),
        steps,
        active.ctypes.data,
        space.ctypes.data,
        drafts.data_ptr(),
        threads,
    )
    del held_by_pass, held_by_rows
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
    threads = torch.get_num_threads()
    logits = torch.empty(count, model.vocab_size, dtype=torch.float32)
    tokens, logprobs = torch.empty(count, dtype=torch.int64), torch.empty(count)
    longest = max(batch.ragged.context_lens) + passes - 1
    of_pass, held_by_pass = model.arguments(batch, logits, longest)
    # Rows move up as sequences end; the caller's stay.
    own = replace(
        sampling,
        temperature=sampling.temperature.clone(),
        top_p=sampling.top_p.clone(),
        min_p=sampling.min_p.clone(),
        top_k=sampling.top_k.clone(),
    )
    own_counters = counters.clone()
    of_rows, held_by_rows = verify.arguments_of(
        logits, own_counters, own, threads, tokens, logprobs
    )
    space = _space(batch)
    most, made = np.array(limits, dtype=np.int32), np.zeros(count, dtype=np.int32)
    all_tokens = np.empty((passes, count), dtype=np.int64)
    all_logprobs = np.empty((passes, count), dtype=np.float32)
    failed = model.kernels.generate(
        byref(model.model),
        byref(of_pass),
        byref(of_rows),
        *(most.ctypes.data, stops.starts.ctypes.data, stops.ids.ctypes.data),
        *(space.ctypes.data, all_tokens.ctypes.data, all_logprobs.ctypes.data),
        made.ctypes.data,
        threads,
    )
    del held_by_pass, held_by_rows
    if failed:
        raise MemoryError(f"no memory for {passes} passes of {count} sequences")
    return Generated(all_tokens.T.tolist(), all_logprobs.T.tolist(), made.tolist())


def _space(batch: DecoderBatch) -> np.ndarray:
    """Room for what later passes read, with the next positions and the sequences filled in."""
    contexts = batch.ragged.context_lens
    count = len(contexts)
    space = np.zeros((_WORDS_PER_SEQUENCE, count), dtype=np.int64)
    space[4] = contexts
    space[5:].reshape(-1).view(np.int32)[:count] = np.arange(count)
    return space
