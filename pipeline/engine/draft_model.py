"""A draft model beside the verifier: one ragged pass per drafted token, for all sequences at once.

It samples with the request's own noise (Gumbel coupling), so where its distribution is the
verifier's its tokens are the verifier's too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

from torch import Tensor

from specbatch.pipeline.engine.batch import Chunk
from specbatch.pipeline.engine.blocks import KvState
from specbatch.pipeline.engine.runner import ModelRunner
from specbatch.pipeline.engine.sampler import choose_sampler
from specbatch.pipeline.engine.sampling import sampling_rows
from specbatch.pipeline.engine.sequence import Sequence
from specbatch.pipeline.policy.step_time import StepTime

MAX_PASS_TOKENS = 2048  # of all sequences together; what is above it is fed beforehand


class DraftModelProposer:
    """Owns the draft model's KV; `kv.length` trails the sequence by the tokens not yet fed."""

    name = "draft-model"

    def __init__(self, runner: ModelRunner, max_depth: int = 8) -> None:
        self._runner = runner
        self._sampler = choose_sampler(runner.device, runner.kernels)
        self._max_depth = max_depth
        # Hopeful at first: a proposer that is never tried is never measured.
        self.pass_time = StepTime(base_sec=1e-4, row_sec=1e-6)
        self._kv: dict[Sequence, KvState] = {}

    def available(self, sequence: Sequence) -> int:
        room = self._runner.context_tokens - len(sequence.tokens)
        kv = self._kv.get(sequence, KvState())
        missing = self._runner.blocks.missing_blocks(kv, len(sequence.tokens) + self._max_depth)
        return (
            0 if missing > self._runner.blocks.free_blocks else max(0, min(self._max_depth, room))
        )

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sequences]
        active = self._reserve(sequences, depths)
        for position in range(max((depths[i] for i in active), default=0)):
            active = [i for i in active if depths[i] > position]
            batch = [sequences[i] for i in active]
            feeds = [
                self._unfed(s) if position == 0 else [drafts[i][-1]]
                for i, s in zip(active, batch, strict=True)
            ]
            begun, fed = time.perf_counter(), sum(map(len, feeds))
            logits = self._forward(batch, feeds)
            if position == 0:  # all that is fed so far is decided
                for sequence in batch:
                    self._runner.blocks.seal(self._kv[sequence], sequence.tokens)
            tokens = self._sample(batch, logits, [drafts[i] for i in active], position)
            self.pass_time.observe(fed, time.perf_counter() - begun)
            for i, token in zip(active, tokens, strict=True):
                drafts[i].append(token)
        return drafts

    def settle(self, sequence: Sequence) -> None:
        """Drop the KV of rejected draft tokens: what agrees with the sequence stays."""
        kv = self._kv.get(sequence)
        if kv is not None:
            self._runner.blocks.trim(kv, len(sequence.tokens) - 1)

    def forget(self, sequence: Sequence) -> None:
        kv = self._kv.pop(sequence, None)
        if kv is not None:
            self._runner.blocks.release(kv)

    def _reserve(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[int]:
        """Indices of the sequences that got blocks for their draft; the others go without."""
        blocks, kept = self._runner.blocks, []
        for i, (sequence, depth) in enumerate(zip(sequences, depths, strict=True)):
            if sequence not in self._kv:
                self._kv[sequence] = KvState()
                blocks.adopt(self._kv[sequence], sequence.tokens)
            kv = self._kv[sequence]
            length = len(sequence.tokens) + depth
            if blocks.missing_blocks(kv, length) <= blocks.free_blocks:
                blocks.grow(kv, length)
                kept.append(i)
        return kept

    def _unfed(self, sequence: Sequence) -> list[int]:
        return sequence.tokens[self._kv[sequence].length :]

    def _forward(self, batch: Seq[Sequence], feeds: Seq[list[int]]) -> Tensor:
        """Feed each sequence its tokens, many in several passes; logits of each one's last."""
        too_many = sum(map(len, feeds)) - MAX_PASS_TOKENS
        for sequence, feed in zip(batch, feeds, strict=True):
            while too_many > 0 and len(feed) > 1:
                early = min(len(feed) - 1, MAX_PASS_TOKENS)
                self._runner.forward([Chunk(self._kv[sequence], feed[:early], 0)])
                del feed[:early]
                too_many -= early
        return self._runner.forward(
            [Chunk(self._kv[s], feed, 1) for s, feed in zip(batch, feeds, strict=True)]
        )

    def _sample(
        self, batch: Seq[Sequence], logits: Tensor, drafts: Seq[list[int]], position: int
    ) -> list[int]:
        rows, counters = sampling_rows(batch, [1] * len(batch), logits.device, drafts, position)
        return self._sampler.sample(logits, counters, rows).tolist()
