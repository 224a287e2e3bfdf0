"""A draft model beside the verifier: one ragged pass per drafted token for all sequences; on the
native path, one call makes all passes of a draft.

It samples with the request's own noise (Gumbel coupling), so where its distribution equals
the verifier's, its tokens do too. For ratio tests it samples with its own noise, fresh for every
block, and remembers the distributions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from specbatch.kernels.multi_step.reference import repeatable
from specbatch.kernels.verify.contract import SamplingRows
from specbatch.kernels.verify.reference import process
from specbatch.pipeline.engines.exact.model.batch import Chunk
from specbatch.pipeline.engines.exact.model.runner import ModelRunner
from specbatch.pipeline.engines.exact.sampling.sampler import choose_sampler
from specbatch.pipeline.engines.exact.sampling.sampling import sampling_rows
from specbatch.pipeline.engines.models.draft_names import DRAFT_MODEL
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.state.kv_blocks import KvState
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.policy import tuning
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.pipeline.policy.step_cost import LinearCost
from specbatch.schemas.records import Verification
from specbatch.schemas.seeds import draft_seed

MOST_READ = 16  # tokens that may be read for one measurement of drift
MAX_PASS_TOKENS = 2048  # of all sequences together; what is above it is fed beforehand


class DraftModelProposer(Proposer):
    """Owns the draft model's KV; `kv.length` trails the sequence by the tokens not yet fed."""

    pass_time: LinearCost
    has_draft_probs = True

    def __init__(
        self,
        runner: ModelRunner,
        pass_time: LinearCost | None = None,
        name: str = DRAFT_MODEL,
        fingerprint: str = "",
    ) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self._runner = runner
        self._sampler = choose_sampler(runner.device, runner.kernels)
        self.pass_time = pass_time or Knowledge().draft_time_of(self.name)
        self._kv: dict[Sequence, KvState] = {}
        # Of the last draft: [vocab_size] a token.
        self._draft_probs: dict[Sequence, list[Tensor]] = {}

    def available(self, sequence: Sequence) -> int:
        room = self._runner.context_tokens - len(sequence.tokens)
        kv = self._kv.get(sequence, KvState())
        missing = self._runner.blocks.missing_blocks(kv, len(sequence.tokens) + tuning.MAX_PASSES)
        if missing > self._runner.blocks.free_blocks:
            return 0
        return max(0, min(tuning.MAX_PASSES, room))

    def behind(self, sequence: Sequence) -> int:
        kv = self._kv.get(sequence)
        return max(0, len(sequence.tokens) - (0 if kv is None else kv.length))

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sequences]
        for sequence in sequences:
            self._draft_probs.pop(sequence, None)
        active = self._reserve(sequences, depths)
        if not active:
            return drafts
        begun, recordings = time.perf_counter(), self._runner.recordings
        active.sort(key=lambda i: -depths[i])  # those still drafted for are always the first
        batch, wanted = [sequences[i] for i in active], [depths[i] for i in active]
        fed = sum(map(self.behind, batch))  # before some of it is, in passes of its own
        feeds = self._feeds(batch)
        rows = self._rows_at_once(batch)
        if rows is not None:
            made = self._at_once(batch, wanted, feeds, *rows)
        else:
            made = self._one_by_one(batch, wanted, feeds)
        passes, drafted = wanted[0], sum(wanted)
        sizes = (1.0, passes, fed + drafted - len(batch))
        if self._runner.recordings == recordings:
            self.pass_time.observe(sizes, time.perf_counter() - begun)
        for i, draft in zip(active, made, strict=True):
            drafts[i] = draft
        return drafts

    def draft_probs(self, sequence: Sequence) -> Tensor:
        """float32 [drafted, vocab_size], of sequences whose verification is not coupled."""
        return torch.stack(self._draft_probs[sequence])

    def next_token_logprobs(self, sequence: Sequence) -> Tensor | None:
        """float32 [vocab_size]: log-probabilities of the token behind a sequence's last one.

        It forgets what it reads for this and reads it again to draft, so drafts do not change.
        None if it would have to read more than a few tokens, or lacks blocks.
        """
        kv, tokens = self._kv.get(sequence), sequence.tokens
        if kv is None or not 0 < len(tokens) - kv.length <= MOST_READ:
            return None
        if self._runner.blocks.missing_blocks(kv, len(tokens)):
            return None
        length = kv.length
        try:
            logits = self._runner.forward([Chunk(kv, tokens[length:], 1)])
        finally:
            self._runner.blocks.trim(kv, length)
        return logits[0].log_softmax(dim=0)

    def on_verified(self, sequence: Sequence) -> None:
        """Drop the KV of rejected draft tokens: what agrees with the sequence stays.

        A draft that was only compared is dropped before anything is decided behind it: then the
        sequence's last token was fed too, and its block may be sealed already. Then the next draft
        reads that block again if it begins at the same place.
        """
        self._draft_probs.pop(sequence, None)
        kv = self._kv.get(sequence)
        if kv is not None:
            blocks = self._runner.blocks
            blocks.trim(kv, max(len(sequence.tokens) - 1, kv.sealed * blocks.block_size))

    def forget(self, sequence: Sequence) -> None:
        self._draft_probs.pop(sequence, None)
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
            if kv.length == len(sequence.tokens):  # it drafted here, and the last block is sealed
                blocks.release(kv)
                blocks.adopt(kv, sequence.tokens)
            length = len(sequence.tokens) + depth
            if blocks.missing_blocks(kv, length) <= blocks.free_blocks:
                blocks.grow(kv, length)
                kept.append(i)
        return kept

    def _feeds(self, batch: Seq[Sequence]) -> list[list[int]]:
        """The tokens not fed yet; where they are too many for a pass, some are fed now."""
        feeds = [s.tokens[self._kv[s].length :] for s in batch]
        too_many = sum(map(len, feeds)) - MAX_PASS_TOKENS
        for sequence, feed in zip(batch, feeds, strict=True):
            while too_many > 0 and len(feed) > 1:
                early = min(len(feed) - 1, MAX_PASS_TOKENS)
                self._runner.forward([Chunk(self._kv[sequence], feed[:early], 0)])
                del feed[:early]
                too_many -= early
        return feeds

    def _rows_at_once(self, batch: Seq[Sequence]) -> tuple[SamplingRows, Tensor] | None:
        """(parameters, counters) for one native call; None: it cannot draft for all of them."""
        if not self._runner.runs_several:
            return None
        if any(s.grammar or s.verification is not Verification.COUPLED for s in batch):
            return None
        rows, counters = sampling_rows(batch, [1] * len(batch), self._runner.device)
        return (rows, counters) if repeatable(rows) else None

    def _at_once(
        self,
        batch: Seq[Sequence],
        depths: list[int],
        feeds: Seq[list[int]],
        rows: SamplingRows,
        counters: Tensor,
    ) -> list[list[int]]:
        """All tokens of all drafts in one native call."""
        chunks = [Chunk(self._kv[s], feed, 1) for s, feed in zip(batch, feeds, strict=True)]
        tokens = self._runner.draft(chunks, depths, counters, rows).T.tolist()
        self._seal(batch)
        for chunk, depth in zip(chunks, depths, strict=True):
            chunk.kv.length += depth - 1
        return [draft[:depth] for draft, depth in zip(tokens, depths, strict=True)]

    def _one_by_one(
        self, batch: Seq[Sequence], depths: Seq[int], feeds: list[list[int]]
    ) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in batch]
        for position in range(depths[0]):
            count = sum(depth > position for depth in depths)
            chunks = [
                Chunk(self._kv[s], feed, 1)
                for s, feed in zip(batch[:count], feeds[:count], strict=True)
            ]
            logits = self._runner.forward(chunks)
            if position == 0:
                self._seal(batch)
            tokens = self._sample(batch[:count], logits, drafts[:count], position)
            for draft, token in zip(drafts, tokens, strict=False):
                draft.append(token)
            feeds = [[token] for token in tokens]
        return drafts

    def _seal(self, batch: Seq[Sequence]) -> None:
        """Offer what is decided, and only that, to sequences that begin alike."""
        for sequence in batch:
            self._runner.blocks.seal(self._kv[sequence], sequence.tokens)

    def _sample(
        self, batch: Seq[Sequence], logits: Tensor, drafts: Seq[list[int]], position: int
    ) -> list[int]:
        rows, counters = sampling_rows(batch, [1] * len(batch), logits.device, drafts, position)
        own = [i for i, s in enumerate(batch) if s.verification is not Verification.COUPLED]
        if own:
            chosen = [batch[i] for i in own]
            seeds = [draft_seed(s.request.seed, s.num_output) for s in chosen]
            counters[own, 0] = torch.tensor(seeds, device=counters.device)
            before = [drafts[i] for i in own]
            of_own, _ = sampling_rows(chosen, [1] * len(own), logits.device, before, position)
            probs = process(logits[own], of_own).softmax(dim=1)
            for sequence, row in zip(chosen, probs, strict=True):
                self._draft_probs.setdefault(sequence, []).append(row)
        return self._sampler.sample(logits, counters, rows).tolist()
