"""What several passes in one call take and return."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Stops(NamedTuple):
    """Tokens that end sequences: those of sequence i are `ids[starts[i] : starts[i + 1]]`."""

    starts: NDArray[np.int64]  # [num_seqs + 1]
    ids: NDArray[np.int64]


class Generated(NamedTuple):
    """Of every sequence: its first `made[i]` entries are decided, the others mean nothing."""

    tokens: list[list[int]]  # [num_seqs, made or more]
    logprobs: list[list[float]]  # [num_seqs, made or more]
    made: list[int]  # [num_seqs], at least 1
