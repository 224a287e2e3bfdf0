"""Gumbel noise in C, with the bits of `reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from specbatch.kernels.native import library


def gumbel(
    counters: Tensor,  # [num_rows, 2] int64: (request key, position)
    vocab_size: int,
    stream: int = 0,
) -> Tensor:
    """As `reference.gumbel`. Raises `NativeUnavailableError` where there is none."""
    counters = counters.contiguous()
    out = torch.empty(counters.shape[0], vocab_size, dtype=torch.float32)
    rows = counters.shape[0]
    library().gumbel(counters.data_ptr(), rows, vocab_size, stream, out.data_ptr())
    return out
