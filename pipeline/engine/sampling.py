"""Tensors of per-row sampling parameters for one verification."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from specbatch.kernels.verify.contract import SamplingRows
from specbatch.pipeline.engine.sequence import Sequence


def sampling_rows(
    sequences: Seq[Sequence], rows_per_sequence: Seq[int], device: torch.device
) -> tuple[SamplingRows, Tensor]:
    """(parameters, counters) for `rows_per_sequence[i]` consecutive output positions each.

    Row j of a sequence decides output position num_output + j; counters are (seed, position).
    """
    counts = np.asarray(rows_per_sequence)
    params = [s.request.params for s in sequences]
    offsets = np.concatenate(([0], np.cumsum(counts)))
    positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
    positions += np.repeat([s.num_output for s in sequences], counts)
    seeds = np.repeat(np.array([s.request.seed for s in sequences], dtype=np.int64), counts)

    def spread(values: list[float], dtype: type) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, dtype=dtype), counts)).to(device)

    forbidden = [
        (row, stop)
        for i, s in enumerate(sequences)
        if s.num_output < s.request.params.min_tokens
        for row in range(offsets[i], offsets[i + 1])
        if positions[row] < s.request.params.min_tokens
        for stop in sorted(s.stop_ids)
    ]
    rows, tokens = zip(*forbidden, strict=True) if forbidden else ((), ())
    parameters = SamplingRows(
        temperature=spread([p.temperature for p in params], np.float32),
        top_k=spread([p.top_k for p in params], np.int64),
        top_p=spread([p.top_p for p in params], np.float32),
        min_p=spread([p.min_p for p in params], np.float32),
        forbidden_rows=torch.tensor(rows, dtype=torch.int64, device=device),
        forbidden_tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
        any_sampled=any(p.temperature > 0 for p in params),
        any_top_k=any(p.top_k > 0 for p in params),
        any_top_p=any(p.top_p < 1 for p in params),
        any_min_p=any(p.min_p > 0 for p in params),
    )
    counters = torch.from_numpy(np.stack((seeds, positions), axis=1)).to(device)
    return parameters, counters
