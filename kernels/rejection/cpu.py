"""Rejection on processors: the definition, with its noise made in C."""

from __future__ import annotations

from torch import Tensor

from specbatch.kernels.counters.cpu import gumbel
from specbatch.kernels.rejection.reference import accept_blocks, accept_tokens, emit
from specbatch.kernels.verify.contract import SamplingRows, Verdict


def verify_tokens(
    target_logits: Tensor,  # [num_rows, vocab_size] float32, unprocessed
    draft_probs: Tensor,  # [num_draft_rows, vocab_size] float32: Q of all rows but bonus rows
    draft_tokens: Tensor,  # [num_rows] int64; PLACEHOLDER on each bonus row
    row_offsets: Tensor,  # [num_seqs + 1] int64, rows of sequence i
    counters: Tensor,  # [num_rows, 2] int64: (request key, position)
    sampling: SamplingRows,
) -> Verdict:
    """As `reference.verify_tokens`."""
    found = accept_tokens(target_logits, draft_probs, draft_tokens, row_offsets, counters, sampling)
    return emit(found, target_logits, draft_tokens, counters, sampling.top, gumbel)


def verify_blocks(
    target_logits: Tensor,  # [num_rows, vocab_size] float32, unprocessed
    draft_probs: Tensor,  # [num_draft_rows, vocab_size] float32: Q of all rows but bonus rows
    draft_tokens: Tensor,  # [num_rows] int64; PLACEHOLDER on each bonus row
    row_offsets: Tensor,  # [num_seqs + 1] int64, rows of sequence i
    counters: Tensor,  # [num_rows, 2] int64: (request key, position)
    sampling: SamplingRows,
) -> Verdict:
    """As `reference.verify_blocks`."""
    found = accept_blocks(target_logits, draft_probs, draft_tokens, row_offsets, counters, sampling)
    return emit(found, target_logits, draft_tokens, counters, sampling.top, gumbel)
