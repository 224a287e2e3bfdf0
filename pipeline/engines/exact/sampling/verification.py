"""Decides the tokens of one step: each sequence by its kind of test, one batch per kind."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specbatch.kernels.paged_attention.contract import to_device
from specbatch.kernels.verify.contract import PLACEHOLDER, TopTokens, Verdict
from specbatch.pipeline.engines.exact.sampling.sampler import Sampler
from specbatch.pipeline.engines.exact.sampling.sampling import Columns, sampling_rows, top_rows
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.engines.state.step import Draft
from specbatch.schemas.records import TopLogprobs, Verification


@torch.inference_mode()
def verify(
    sampler: Sampler,
    sequences: Seq[Sequence],
    drafts: Seq[Draft],
    logits: Tensor,  # [num_rows, vocab_size]: 1 + len(draft) rows of each sequence
    columns: Columns,  # of the sequences
) -> Verdict:
    """The verdict on every row. A coupled sequence gets the same bits in any company."""
    most = max(columns.top, default=0)
    if columns.kind is not None:
        return _verify_kind(sampler, columns, sequences, drafts, logits, most)
    kinds = [s.verification for s in sequences]
    counts = np.array([1 + len(d) for d in drafts])
    numbers = np.array([list(Verification).index(kind) for kind in kinds])
    kind_of_row = to_device(np.repeat(numbers, counts), logits.device)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    accepted = torch.empty(len(sequences), dtype=torch.int64, device=logits.device)
    tops: list[TopTokens] = []
    for number, kind in enumerate(Verification):
        of_kind = [i for i, k in enumerate(kinds) if k is kind]
        if not of_kind:
            continue
        rows = (kind_of_row == number).nonzero()[:, 0]
        alike = [sequences[i] for i in of_kind]
        part = _verify_kind(
            sampler,
            Columns(alike, logits.device),
            alike,
            [drafts[i] for i in of_kind],
            logits[rows],
            most,
        )
        tokens[rows], logprobs[rows], accepted[of_kind] = part.tokens, part.logprobs, part.accepted
        if part.top is not None:
            tops.append(replace(part.top, rows=rows[part.top.rows]))
    return Verdict(tokens, logprobs, accepted, _joined(tops))


def _verify_kind(
    sampler: Sampler,
    columns: Columns,  # of sequences that ask for one kind of test
    sequences: Seq[Sequence],
    drafts: Seq[Draft],
    logits: Tensor,
    most: int,  # likely tokens of a row, where any are wanted: as many in every kind
) -> Verdict:
    counts = [1 + len(d) for d in drafts]
    token_ids = [d.token_ids for d in drafts]
    sampling, counters = sampling_rows(sequences, counts, logits.device, token_ids, columns=columns)
    if top := top_rows(columns, counts, logits.device):
        sampling = replace(sampling, top=replace(top, count=most))
    draft, offsets = columns.undrafted
    if any(drafts):
        draft_rows = [token for ids in token_ids for token in (*ids, PLACEHOLDER)]
        draft = to_device(np.array(draft_rows, dtype=np.int64), logits.device)
        offsets = to_device(np.cumsum([0, *counts]), logits.device)
    if columns.kind is Verification.COUPLED:
        return sampler.verify(logits, draft, offsets, counters, sampling)
    draft_probs = [logits.new_empty(0, logits.shape[1])]
    for drafted in filter(len, drafts):
        assert drafted.probs is not None, "the speculator asks nobody else for such a sequence"
        draft_probs.append(drafted.probs())
    test = (
        sampler.verify_tokens if columns.kind is Verification.REJECTION else sampler.verify_blocks
    )
    return test(logits, torch.cat(draft_probs), draft, offsets, counters, sampling)


def _joined(tops: Seq[TopTokens]) -> TopTokens | None:
    """One of several kinds' with equally many tokens a row, its rows ascending again."""
    if not tops:
        return None
    rows = torch.cat([top.rows for top in tops])
    order = rows.argsort()
    tokens = torch.cat([top.tokens for top in tops])[order]
    return TopTokens(rows[order], tokens, torch.cat([top.logprobs for top in tops])[order])


class MostLikely:
    """The most likely tokens of a verdict, by sequence. Reads the tensors once per step."""

    def __init__(self, top: TopTokens) -> None:
        self._slots = {row: slot for slot, row in enumerate(top.rows.tolist())}
        self._tokens, self._logprobs = top.tokens.tolist(), top.logprobs.tolist()

    def of(self, sequence: Sequence, begin: int, end: int) -> list[TopLogprobs]:
        """Those of rows begin .. end - 1, as many as the sequence's request wants; [] for none."""
        count = sequence.request.params.top_logprobs
        if not count:
            return []
        slots = [self._slots[row] for row in range(begin, end)]
        return [(tuple(self._tokens[s][:count]), tuple(self._logprobs[s][:count])) for s in slots]
