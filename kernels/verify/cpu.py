"""Verification in C: one pass over each row, noise only where it could still decide.

A token whose score falls short of the best so far by more than the largest Gumbel value there is
needs no noise, which is nearly all of a vocabulary.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_int64, c_void_p

import torch
from torch import Tensor

from specbatch.kernels.native import library
from specbatch.kernels.verify.contract import (
    Adjustments,
    SamplingRows,
    TopRows,
    TopTokens,
    Verdict,
)


class SamplingArguments(Structure):
    """`Sampling` of csrc/sampling.h."""

    _fields_ = (
        ("rows", c_int64),
        ("vocab", c_int64),
        *((name, c_void_p) for name in ("logits", "counters", "temperature", "top_p", "min_p")),
        *((name, c_void_p) for name in ("top_k", "forbidden_starts", "forbidden")),
        *((name, c_void_p) for name in ("adjust_starts", "adjust", "adjust_scale", "adjust_add")),
        *((name, c_void_p) for name in ("allowed", "tokens", "logprobs", "space")),
        ("top_count", c_int64),
        *((name, c_void_p) for name in ("top_at", "top_tokens", "top_logprobs")),
    )


def verify(
    target_logits: Tensor,  # [num_rows, vocab_size] float32, unprocessed
    draft_tokens: Tensor,  # [num_rows] int64; PLACEHOLDER on each bonus row
    row_offsets: Tensor,  # [num_seqs + 1] int64, rows of sequence i
    counters: Tensor,  # [num_rows, 2] int64: (request key, position)
    sampling: SamplingRows,
) -> Verdict:
    """As `reference.verify`."""
    logprobs = torch.empty(target_logits.shape[0], dtype=torch.float32)
    top = _room_for(sampling.top, target_logits.shape[1])
    tokens = _sample(target_logits, counters, sampling, logprobs, top)
    return Verdict(tokens, logprobs, _matched(tokens, draft_tokens, row_offsets), top)


def sample(
    logits: Tensor,  # [num_rows, vocab_size] float32, unprocessed
    counters: Tensor,  # [num_rows, 2] int64
    sampling: SamplingRows,
) -> Tensor:
    """As `reference.sample`."""
    return _sample(logits, counters, sampling, None, None)


def _sample(
    logits: Tensor,
    counters: Tensor,
    sampling: SamplingRows,
    logprobs: Tensor | None,
    top: TopTokens | None,
) -> Tensor:
    rows, vocab_size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    threads = min(torch.get_num_threads(), max(rows, 1))
    arguments, _held = arguments_of(logits, counters, sampling, threads, tokens, logprobs, top)
    if library().sample(byref(arguments), threads):
        raise MemoryError(f"no memory for the scores of {vocab_size} tokens")
    return tokens


def arguments_of(
    logits: Tensor,
    counters: Tensor,
    sampling: SamplingRows,
    threads: int,
    tokens: Tensor,
    logprobs: Tensor | None = None,
    top: TopTokens | None = None,
) -> tuple[SamplingArguments, list[Tensor | None]]:
    """The C side's view of rows to be sampled, and the tensors it points into."""
    rows, vocab_size = logits.shape
    held: list[Tensor | None] = [
        t if t is None else t.contiguous()
        for t in (
            *(logits, counters, sampling.temperature, sampling.top_p, sampling.min_p),
            sampling.top_k,
            *_forbidden(sampling, rows),
            *_adjustments(sampling.adjust, rows),
            sampling.allowed,
        )
    ]
    space = torch.empty(threads * 6 * vocab_size, dtype=torch.float32)
    held += [tokens, logprobs, space]
    most_likely = [] if top is None else [_slots(top.rows, rows), top.tokens, top.logprobs]
    arguments = SamplingArguments(
        rows,
        vocab_size,
        *map(_address, held),
        top.tokens.shape[1] if top is not None else 0,
        *map(_address, most_likely),
    )
    return arguments, held + most_likely


def _matched(tokens: Tensor, draft_tokens: Tensor, row_offsets: Tensor) -> Tensor:
    """As `reference.match_prefix`."""
    parts = [t.contiguous() for t in (tokens, draft_tokens, row_offsets)]
    accepted = torch.empty(row_offsets.shape[0] - 1, dtype=torch.int64)
    library().match(*map(_address, parts), accepted.shape[0], accepted.data_ptr())
    return accepted


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _room_for(top: TopRows | None, vocab_size: int) -> TopTokens | None:
    if top is None:
        return None
    shape = (top.rows.shape[0], min(top.count, vocab_size))
    return TopTokens(
        top.rows, torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.float32)
    )


def _slots(of_rows: Tensor, rows: int) -> Tensor:
    """The position of each row among `of_rows`, -1 where it is not there."""
    slots = torch.full((rows,), -1, dtype=torch.int64)
    slots[of_rows] = torch.arange(of_rows.shape[0])
    return slots


def _starts(of_rows: Tensor, rows: int) -> Tensor:
    """Where each row's entries begin, and where the last row's end."""
    starts = torch.zeros(rows + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(of_rows, minlength=rows), 0, out=starts[1:])
    return starts


def _forbidden(sampling: SamplingRows, rows: int) -> tuple[Tensor | None, Tensor | None]:
    if not sampling.forbidden_rows.shape[0]:
        return None, None
    order = sampling.forbidden_rows.argsort(stable=True)
    return _starts(sampling.forbidden_rows, rows), sampling.forbidden_tokens[order]


def _adjustments(adjust: Adjustments | None, rows: int) -> tuple[Tensor | None, ...]:
    if adjust is None:
        return None, None, None, None
    return _starts(adjust.rows, rows), adjust.tokens, adjust.scale, adjust.add
