"""What became of the times of schedules: one record per schedule and time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RunState(StrEnum):
    """What became of one logical time of a schedule."""

    SEEN = "seen"  # no run: from here on the schedule is looked after as its row says
    QUEUED = "queued"  # it is to be submitted, now or when an older run is over
    SUBMITTED = "submitted"
    SKIPPED = "skipped"  # an overlap policy left it out
    MISSED = "missed"  # nothing looked at the schedule when it was due
    FAILED = "failed"  # it could not be submitted


PAUSED = "paused"  # what the row of a schedule that is seen says while its times only pass
RUNS = frozenset(RunState) - {RunState.SEEN}
LOST = frozenset({RunState.MISSED, RunState.FAILED})  # what somebody should be told of


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """One logical time of one schedule. Times are seconds since the epoch."""

    schedule: str
    logical_at: float
    state: RunState
    job_id: str | None = None
    reason: str | None = None
    noted_at: float = 0.0  # by the store's clock, which sets it


def in_order(run: ScheduleRun) -> tuple[str, float]:
    """By schedule, then by time."""
    return run.schedule, run.logical_at
