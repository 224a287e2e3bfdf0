"""Tensors of per-row sampling parameters for one verification."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbatch.kernels.verify.contract import Adjustments, SamplingRows, TopRows
from specbatch.pipeline.engine.adjusting import Ids
from specbatch.pipeline.engine.sequence import Sequence
from specbatch.pipeline.engine.transfer import to_device


def sampling_rows(
    sequences: Seq[Sequence],
    rows_per_sequence: Seq[int],
    device: torch.device,
    drafts: Seq[Seq[int]] | None = None,
    first: int = 0,
) -> tuple[SamplingRows, Tensor]:
    """(parameters, counters) for `rows_per_sequence[i]` consecutive output positions each.

    Row j of a sequence decides output position num_output + first + j, where the first + j first
    tokens of its draft are part of the context; counters are (seed, position).
    """
    counts = np.asarray(rows_per_sequence)
    params = [s.request.params for s in sequences]
    offsets = np.concatenate(([0], np.cumsum(counts)))
    positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts) + first
    positions += np.repeat([s.num_output for s in sequences], counts)
    seeds = np.repeat(np.array([s.request.seed for s in sequences], dtype=np.int64), counts)
    drafts = drafts if drafts is not None else [()] * len(sequences)

    def spread(values: list[float], dtype: type) -> Tensor:
        return to_device(np.repeat(np.asarray(values, dtype=dtype), counts), device)

    forbidden_rows, forbidden_tokens = _forbidden(sequences, offsets, positions, drafts, first)
    parameters = SamplingRows(
        temperature=spread([p.temperature for p in params], np.float32),
        top_k=spread([p.top_k for p in params], np.int64),
        top_p=spread([p.top_p for p in params], np.float32),
        min_p=spread([p.min_p for p in params], np.float32),
        forbidden_rows=to_device(forbidden_rows, device),
        forbidden_tokens=to_device(forbidden_tokens, device),
        any_sampled=any(p.temperature > 0 for p in params),
        any_top_k=any(p.top_k > 0 for p in params),
        any_top_p=any(p.top_p < 1 for p in params),
        any_min_p=any(p.min_p > 0 for p in params),
        adjust=_adjustments(sequences, offsets, drafts, first, device),
    )
    counters = to_device(np.stack((seeds, positions), axis=1), device)
    return parameters, counters


def top_rows(
    sequences: Seq[Sequence], rows_per_sequence: Seq[int], device: torch.device
) -> TopRows | None:
    """The rows of sequences that want their most likely tokens; None when none does."""
    counts = [s.request.params.top_logprobs for s in sequences]
    if not any(counts):
        return None
    rows = np.flatnonzero(np.repeat(counts, rows_per_sequence))
    return TopRows(torch.from_numpy(rows).to(device), max(counts))


def _forbidden(
    sequences: Seq[Sequence], offsets: Ids, positions: Ids, drafts: Seq[Seq[int]], first: int
) -> tuple[Ids, Ids]:
    """(rows, tokens): stop ids before min_tokens, bad tokens, ends of bad words."""
    rows: list[Ids] = [np.empty(0, dtype=np.int64)]
    tokens: list[Ids] = [np.empty(0, dtype=np.int64)]

    def forbid(row: int, ids: Ids) -> None:
        rows.append(np.full(len(ids), row, dtype=np.int64))
        tokens.append(ids)

    for i, s in enumerate(sequences):
        begin, end = int(offsets[i]), int(offsets[i + 1])
        if s.num_output < s.request.params.min_tokens and s.stop_ids:
            stops = np.array(sorted(s.stop_ids), dtype=np.int64)
            for row in range(begin, end):
                if positions[row] < s.request.params.min_tokens:
                    forbid(row, stops)
        if s.bad_words is not None:
            for row, ids in enumerate(s.bad_words.rows(s.tokens, drafts[i], first, end - begin)):
                forbid(begin + row, ids)
    return np.concatenate(rows), np.concatenate(tokens)


def _adjustments(
    sequences: Seq[Sequence],
    offsets: Ids,
    drafts: Seq[Seq[int]],
    first: int,
    device: torch.device,
) -> Adjustments | None:
    """Penalties and biases; None when no sequence has any."""
    rows: list[int] = []
    made = []
    for i, s in enumerate(sequences):
        if s.adjuster is not None:
            begin, end = int(offsets[i]), int(offsets[i + 1])
            rows.extend(range(begin, end))
            made.extend(s.adjuster.rows(drafts[i], first, end - begin))
    if not made:
        return None
    sizes = [len(tokens) for tokens, _, _ in made]

    def joined(part: int) -> Tensor:
        arrays: list[NDArray[np.generic]] = [row[part] for row in made]
        return to_device(np.concatenate(arrays), device)

    of_rows = to_device(np.repeat(np.array(rows, dtype=np.int64), sizes), device)
    return Adjustments(of_rows, joined(0), joined(1), joined(2))
