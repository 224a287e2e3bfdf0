"""What an engine has done so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from specbatch.schemas.provenance import Ticks


@dataclass(slots=True)
class EngineStats:
    """Running totals, read by whoever shows progress."""

    steps: int = 0
    generated_tokens: int = 0
    finished: int = 0
    proposed: int = 0
    accepted: int = 0
    verifier_passes: int = 0  # (sequence, step) pairs that decided tokens
    busy_sec: float = 0.0
    time: list[int] = field(default_factory=lambda: [0] * 6)  # ticks by kind, as `Ticks` has them
    forward_sec: float = 0.0  # the verifier's forward passes alone; on a GPU, queueing them
    reused_tokens: int = 0  # of prompts and preempted sequences: the verifier's KV was there
    checked_tokens: int = 0  # looked at a second time, where bits may depend on the batch
    differing_tokens: int = 0  # of those, decided otherwise the second time
    largest_margin: float = 0.0  # between the scores of two such tokens
    raised_passes: int = 0  # steps whose pass raised: sequences were tried apart, or fewer tokens
    proposer_failures: int = 0  # calls of proposers that raised: their drafts were dropped
    preemptions: int = 0  # sequences put off for want of KV blocks
    kv_blocks: tuple[int, int, int] = (0, 0, 0)  # held, free, cached; if somebody measures
    hints_followed: int = 0  # blocks that came late and lead on from where a sequence was by then
    hints_dropped: int = 0  # and those that led nowhere

    @property
    def ticks(self) -> Ticks:
        """All that was shared among sequences, whatever became of them."""
        return Ticks(*self.time)
