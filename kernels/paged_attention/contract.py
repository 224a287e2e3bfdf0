"""The shape of one ragged batch, whatever implements attention over it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(slots=True)
class RaggedBatch:
    """One unpadded row of tokens: sequence i owns tokens query_starts[i] .. query_starts[i + 1].

    The tokens of a sequence are its newest: with `n` of them and a context of `c` tokens (these
    included) they sit at positions c - n .. c - 1, and each attends to itself and all before it.
    Tokens after the last sequence are padding: they attend to nothing, and their output is 0.

    A tree of drafts would enter here, as `ancestors`: per sequence a bool [n, n] over its newest
    tokens, True where the key lies on the query's path from the root. It replaces "all before it"
    among these n, and cached keys stay visible to all; positions, which rotary embeddings and
    windows go by, count tokens along the path. No implementation takes one yet, so there is no
    field that could be filled and not be heeded.
    """

    query_starts: list[int]  # [num_seqs + 1]
    context_lens: list[int]  # [num_seqs] tokens
    block_tables: list[list[int]]  # [num_seqs][blocks], indices into the caches
    slots: Tensor  # [num_tokens] int64: block * block_size + offset, where a token's KV goes
    # Whether a token's bits must not depend on the batch. If they may, tiles fit the batch.
    batch_invariant: bool = True
    prepared: dict[Any, Any] = field(default_factory=dict)  # what an implementation precomputed


def zeroed_cache(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros for a KV cache. On a processor the system hands pages out when they are first used.

    `torch.zeros` would write them all, and an ample cache would be paid for in full at once.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device. On a GPU the copy is queued and the host goes on."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
