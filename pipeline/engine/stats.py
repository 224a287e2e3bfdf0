"""What an engine has done so far."""

from __future__ import annotations

from dataclasses import dataclass


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
    forward_sec: float = 0.0  # the verifier's forward passes alone; on a GPU, queueing them
    reused_tokens: int = 0  # of prompts and preempted sequences: the verifier's KV was there
    checked_tokens: int = 0  # looked at a second time, where bits may depend on the batch
    differing_tokens: int = 0  # of those, decided otherwise the second time
    largest_margin: float = 0.0  # between the scores of two such tokens
    raised_passes: int = 0  # steps whose pass raised: sequences were tried apart, or fewer tokens
    proposer_failures: int = 0  # calls of proposers that raised: their drafts were dropped
    hints_followed: int = 0  # blocks that came late and lead on from where a sequence was by then
    hints_dropped: int = 0  # and those that led nowhere
