"""The shape of one ragged batch, whatever implements attention over it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NO_TREES = "only the reference attends along trees"


@dataclass(slots=True)
class RaggedBatch:
    """One unpadded row of tokens: sequence i owns tokens query_starts[i] .. query_starts[i + 1].

    The tokens of a sequence are its newest: with `n` of them and a context of `c` tokens (these
    included) they sit at positions c - n .. c - 1, and each attends to itself and all before it.
    Tokens after the last sequence are padding: they attend to nothing, and their output is 0.

    Of a tree of drafts, `parents[i][r]` is the row of sequence i, among these, that row r follows;
    -1: it follows the last token that was cached before the pass. Parents stand before children. A
    row attends to itself, its ancestors and all that was cached before the pass: to what it would
    see if its path were the whole sequence. Positions, by which tokens are rotated, count along
    the path too, but KV lies by rows. Only the reference heeds `parents`; the others refuse them.
    """

    query_starts: list[int]  # [num_seqs + 1]
    context_lens: list[int]  # [num_seqs] tokens
    block_tables: list[list[int]]  # [num_seqs][blocks], indices into the caches
    slots: Tensor  # [num_tokens] int64: block * block_size + offset, where a token's KV goes
    parents: list[list[int]] | None = None  # [num_seqs][n]; None: no trees, only chains
    # Whether a token's bits must not depend on the batch. If they may, tiles fit the batch.
    batch_invariant: bool = True
    prepared: dict[Any, Any] = field(default_factory=dict)  # what an implementation precomputed


def path_to(row: int, parents: Sequence[int]) -> list[int]:
    """Rows of a tree from a root down to this one, itself last. One less than their number is its
    depth: its position is that of the first token of the pass plus so many."""
    path = [row]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def zeroed_cache(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros for a KV cache. On a processor the system hands pages out when they are first used.

    `torch.zeros` would write them all, and an ample cache would be paid for in full at once.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device. On a GPU the copy is queued and the host does not wait."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
