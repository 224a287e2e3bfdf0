"""Chooses the sequences of the next pass, and how many tokens of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from specbatch.pipeline.engines.state.kv_blocks import BlockManager
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.engines.state.step import Planned


class Scheduler:
    """First come, first served. Decoding goes before prefilling; the youngest is preempted first.

    A preempted sequence keeps its tokens and loses its KV, which is computed again later to the
    same bits.

    A new sequence reuses the cached blocks of its prefix. If this pass is filling such blocks, it
    waits and reuses them in the next pass.
    """

    def __init__(
        self,
        blocks: BlockManager,
        max_sequences: int,
        max_batch_tokens: int,
        on_preempt: Callable[[Sequence], None] = lambda _: None,
    ) -> None:
        self._blocks = blocks
        self.max_sequences = max_sequences
        self.max_batch_tokens = max_batch_tokens
        self._on_preempt = on_preempt
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.reused_tokens = 0  # tokens whose KV was cached when their sequence was admitted

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running)

    def schedule(self) -> list[Planned]:
        """The sequences of the next pass, with blocks reserved for the tokens they take."""
        budget, preempted = self.max_batch_tokens, self.preemptions
        plan: list[Planned] = []
        # 1) Running sequences: decoding ones first, then unfinished prompts.
        for sequence in sorted(self.running, key=lambda s: s.pending > 1):
            if self.preemptions > preempted and sequence not in self.running:
                continue  # preempted to make room for an older one
            take = min(sequence.pending, budget)
            if take and self._reserve(sequence, take, plan):
                plan.append(Planned(sequence, take))
                budget -= take
        # 2) New sequences.
        if budget and self.waiting and len(self.running) < self.max_sequences:
            self._admit(budget, plan)
        return plan

    def _admit(self, budget: int, plan: list[Planned]) -> None:
        """Admit new sequences while there is room for their tokens and one block to decode into."""
        filling = {key for p in plan for key in self._keys_filled_by(p)}
        held_back: list[Sequence] = []  # they keep their places in the queue
        while budget and self.waiting:
            if len(self.running) + len(held_back) >= self.max_sequences:
                break
            sequence = self.waiting.popleft()
            self._blocks.adopt(sequence.kv, sequence.tokens)
            if self._blocks.sought(sequence.kv, sequence.tokens) in filling:
                self._blocks.release(sequence.kv)
                held_back.append(sequence)
                continue
            take = min(sequence.pending, budget)
            needed = self._blocks.missing_blocks(sequence.kv, sequence.kv.length + take)
            if needed + bool(self.running) > self._blocks.free_blocks:
                self._blocks.release(sequence.kv)
                held_back.append(sequence)
                break
            self._blocks.grow(sequence.kv, sequence.kv.length + take)
            self.reused_tokens += sequence.kv.length
            self.running.append(sequence)
            plan.append(Planned(sequence, take))
            filling.update(self._keys_filled_by(plan[-1]))
            budget -= take
        self.waiting.extendleft(reversed(held_back))

    def _keys_filled_by(self, planned: Planned) -> list[bytes]:
        sequence = planned.sequence
        return self._blocks.filling(sequence.kv, sequence.tokens, planned.take)

    def room_for_draft(self, sequence: Sequence, wanted: int) -> int:
        """Reserve blocks for up to `wanted` draft tokens behind the pending ones; how many fit."""
        base = len(sequence.tokens)
        spare = self._blocks.free_blocks * self._blocks.block_size
        held = len(sequence.kv.blocks) * self._blocks.block_size
        granted = max(0, min(wanted, held + spare - base))
        self._blocks.grow(sequence.kv, base + granted)
        return granted

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or cancelled sequence and free its blocks."""
        self._blocks.release(sequence.kv)
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def _reserve(self, sequence: Sequence, take: int, plan: list[Planned]) -> bool:
        """Reserve blocks, preempting younger sequences; False: it was preempted itself."""
        length = sequence.kv.length + take
        if length <= len(sequence.kv.blocks) * self._blocks.block_size:
            return True
        while self._blocks.missing_blocks(sequence.kv, length) > self._blocks.free_blocks:
            planned = {p.sequence for p in plan}
            victim = next((s for s in reversed(self.running) if s not in planned), sequence)
            self._preempt(victim)
            if victim is sequence:
                return False
        self._blocks.grow(sequence.kv, length)
        return True

    def _preempt(self, victim: Sequence) -> None:
        self._blocks.release(victim.kv)
        self.running.remove(victim)
        self.waiting.appendleft(victim)
        self._on_preempt(victim)
        self.preemptions += 1
