"""Tensors of per-row sampling parameters for one verification."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbatch.kernels.multi_step.contract import Stops
from specbatch.kernels.paged_attention.contract import to_device
from specbatch.kernels.verify.contract import PLACEHOLDER, Adjustments, SamplingRows, TopRows
from specbatch.pipeline.engines.state.penalties import Ids
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.schemas.records import Verification


class Columns:
    """What the requests of some sequences ask of sampling, in their order. It never changes."""

    def __init__(self, sequences: Seq[Sequence], device: torch.device) -> None:
        params = [s.request.params for s in sequences]
        self.prompts = np.array([len(s.request.prompt_ids) for s in sequences], dtype=np.int64)
        self.seeds = np.array([s.request.seed for s in sequences], dtype=np.int64)
        count, none = len(sequences), torch.empty(0, dtype=torch.int64, device=device)

        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device)

        self._one_row_each = SamplingRows(
            temperature=column([p.temperature for p in params], torch.float32),
            top_k=column([p.top_k for p in params], torch.int64),
            top_p=column([p.top_p for p in params], torch.float32),
            min_p=column([p.min_p for p in params], torch.float32),
            forbidden_rows=none,
            forbidden_tokens=none,
            any_sampled=any(p.temperature > 0 for p in params),
            any_top_k=any(p.top_k > 0 for p in params),
            any_top_p=any(p.top_p < 1 for p in params),
            any_min_p=any(p.min_p > 0 for p in params),
        )
        self.undrafted = (  # the draft tokens and offsets of one row each
            torch.full((count,), PLACEHOLDER, dtype=torch.int64, device=device),
            torch.arange(count + 1, device=device),
        )
        # Whether what may come of a token depends on nothing but its logits.
        self.plain = not any(
            s.adjuster or s.bad_words or (s.request.params.min_tokens and s.stop_ids)
            for s in sequences
        )
        self.grammars = [i for i, s in enumerate(sequences) if s.grammar is not None]
        self.stop_ids = [s.stop_ids for s in sequences]
        self.ends_text = any(s.ends_text is not None for s in sequences)
        self.top = [p.top_logprobs for p in params]
        kinds = {s.verification for s in sequences}
        self.kind = kinds.pop() if len(kinds) == 1 else None  # None: several

    def rows(self, counts: Ids, one_each: bool) -> SamplingRows:
        """The parameters of `counts[i]` rows of sequence i; nothing is forbidden or adjusted."""
        rows = self._one_row_each
        if one_each:
            return rows
        return rows.at(sequence_of_row(counts, rows.top_k.device))

    @property
    def multi_step(self) -> bool:
        """Whether a pass needs nothing but the tokens of the pass before it."""
        plain = self.plain and not (self.grammars or any(self.top))
        return plain and self.kind is Verification.COUPLED and not self.ends_text

    @cached_property
    def stops(self) -> Stops:
        starts = np.cumsum([0, *map(len, self.stop_ids)], dtype=np.int64)
        ids = [token for some in self.stop_ids for token in some]
        return Stops(starts, np.array(ids, dtype=np.int64))


def sequence_of_row(counts: Ids, device: torch.device) -> Tensor:
    """int64 [rows]: 0 `counts[0]` times, then 1 `counts[1]` times, and so on.

    Not by `torch.repeat_interleave`: for any size it wakes torch's threads, which then spin for
    milliseconds on the cores of the next passes and make these half as slow again.
    """
    return to_device(np.repeat(np.arange(len(counts)), counts), device)


class LastColumns:
    """The columns of the sequences that were asked for last: mostly the same decide again."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._columns: Columns | None = None

    def of(self, sequences: Seq[Sequence], device: torch.device) -> Columns:
        """Those of the sequences, in this order."""
        if self._columns is None or self._sequences != sequences:
            self._columns, self._sequences = Columns(sequences, device), list(sequences)
        return self._columns


def sampling_rows(
    sequences: Seq[Sequence],
    rows_per_sequence: Seq[int],
    device: torch.device,
    drafts: Seq[Seq[int]] | None = None,
    first: int = 0,
    columns: Columns | None = None,  # theirs, where they are known
) -> tuple[SamplingRows, Tensor]:
    """(parameters, counters) for `rows_per_sequence[i]` consecutive output positions each.

    Row j of a sequence decides output position num_output + first + j, where the first + j first
    tokens of its draft are part of the context; counters are (seed, position).
    """
    columns = columns or Columns(sequences, device)
    counts = np.array(rows_per_sequence, dtype=np.int64)
    decided = np.array([len(s.tokens) for s in sequences], dtype=np.int64) - columns.prompts
    decided += first
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    counters = np.empty((offsets[-1], 2), dtype=np.int64)
    one_each = bool((counts == 1).all())
    if one_each:
        counters[:, 0], counters[:, 1] = columns.seeds, decided
    else:
        counters[:, 0] = np.repeat(columns.seeds, counts)
        counters[:, 1] = np.arange(len(counters)) + np.repeat(decided - offsets[:-1], counts)
    parameters = columns.rows(counts, one_each)
    if not columns.plain:
        drafts = drafts if drafts is not None else [()] * len(sequences)
        rows, tokens = _forbidden(sequences, offsets, counters[:, 1], drafts, first)
        parameters = replace(
            parameters,
            forbidden_rows=to_device(rows, device),
            forbidden_tokens=to_device(tokens, device),
            adjust=_adjustments(sequences, offsets, drafts, first, device),
        )
    if columns.grammars:
        drafts = drafts if drafts is not None else [()] * len(sequences)
        allowed = _allowed(sequences, columns.grammars, offsets, drafts, first)
        parameters = replace(parameters, allowed=to_device(allowed, device))
    return parameters, to_device(counters, device)


def top_rows(columns: Columns, rows_per_sequence: Seq[int], device: torch.device) -> TopRows | None:
    """The rows of sequences that want their most likely tokens; None when none does."""
    if not any(columns.top):
        return None
    rows = np.flatnonzero(np.repeat(columns.top, rows_per_sequence))
    return TopRows(torch.from_numpy(rows).to(device), max(columns.top))


def _allowed(
    sequences: Seq[Sequence], having: Seq[int], offsets: Ids, drafts: Seq[Seq[int]], first: int
) -> NDArray[np.int32]:
    """A row of bits per row of logits; all are set where no grammar says otherwise."""
    grammar = sequences[having[0]].request.grammar
    assert grammar is not None, "they have one"
    allowed = np.full((offsets[-1], -(-grammar.vocab_size // 32)), -1, dtype=np.int32)
    for i in having:
        state = sequences[i].grammar
        assert state is not None, "they have one"
        state.masks(allowed[offsets[i] : offsets[i + 1]], drafts[i], first)
    return allowed


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
