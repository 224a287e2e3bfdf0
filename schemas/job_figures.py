"""Figures of a job for its report, without any text: of groups, of completions, of savings."""

from __future__ import annotations

from dataclasses import dataclass

from specbatch.schemas.provenance import TICKS_PER_SEC
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

    @property
    def rate(self) -> float | None:
        """Accepted ÷ proposed draft tokens."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def sec(self) -> float:
        return self.ticks / TICKS_PER_SEC


@dataclass(frozen=True, slots=True)
class Savings:
    """Dollars saved by drafting; below zero they were lost. `low` to `high` is a 95 % interval."""

    usd: float
    low_usd: float | None  # None: a single control step tells nothing of others
    high_usd: float | None
    taken_usd: float  # by the measured steps, and by drafting ahead for them
    speedup: float  # time at depth 0 by time taken, weighted by what devices cost
    controls: int  # control steps

    @property
    def reach(self) -> float:
        """The largest of its amounts, whose number of decimals the others take."""
        return max(abs(value) for value in (self.usd, self.low_usd or 0.0, self.high_usd or 0.0))

    @property
    def has_interval(self) -> bool:
        return self.low_usd is not None and self.high_usd is not None

    @property
    def is_certain(self) -> bool:
        """Whether the interval excludes $0."""
        return self.low_usd is not None and self.high_usd is not None and (
            self.low_usd > 0 or self.high_usd < 0
        )  # fmt: skip
