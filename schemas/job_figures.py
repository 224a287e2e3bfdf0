"""Figures of a job's groups and completions that its report sums, without any text."""

from __future__ import annotations

from dataclasses import dataclass

from specbatch.schemas.records import FinishReason, Stage


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """One group's totals, as its commit stored them."""

    index: int
    stage: Stage
    rows: int
    done_at: float | None  # seconds since the epoch; None: it is not DONE
    queue_sec: float
    compute_sec: float
    completions: int
    completion_tokens: int
    proposed: int
    accepted: int
    verifier_passes: int
    cost_usd: float


@dataclass(frozen=True, slots=True)
class RowFigures:
    """One completion's counts and its passes. See `provenance.py` for the last five."""

    row_index: int
    sample_index: int
    group_index: int
    tag: str | None
    finish_reason: FinishReason
    prompt_tokens: int
    proposed: int
    accepted: int
    verifier_passes: int
    cost_usd: float
    ticks: int  # of the verifying device
    origins: tuple[int, ...]  # one per token
    steps: tuple[int, ...]
    sources: tuple[str, ...]
    makers: tuple[int, ...]
    drafted: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return len(self.origins)
