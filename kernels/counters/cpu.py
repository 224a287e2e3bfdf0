"""Gumbel noise in C, with the bits of `reference`."""

from __future__ import annotations

from ctypes import c_int64, c_uint32, c_void_p

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
    library().gumbel(
        c_void_p(counters.data_ptr()),
        c_int64(counters.shape[0]),
        c_int64(vocab_size),
        c_uint32(stream),
        c_void_p(out.data_ptr()),
    )
    return out
