"""The shape of one ragged batch, whatever implements attention over it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class RaggedBatch:
    """One unpadded row of tokens: sequence i owns tokens query_starts[i] .. query_starts[i + 1].

    The tokens of a sequence are its newest: with `n` of them and a context of `c` tokens (these
    included) they sit at positions c - n .. c - 1, and each attends to itself and all before it.
    Tokens after the last sequence are padding: they attend to nothing, and their output is 0.
    """

    query_starts: list[int]  # [num_seqs + 1]
    context_lens: list[int]  # [num_seqs] tokens
    block_tables: list[list[int]]  # [num_seqs][blocks], indices into the caches
    slots: Tensor  # [num_tokens] int64: block * block_size + offset, where a token's KV goes
    prepared: dict[Any, Any] = field(default_factory=dict)  # what an implementation precomputed
