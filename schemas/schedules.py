"""Runs of schedules: one record per schedule and logical time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RunState(StrEnum):
    """State of one logical time of a schedule."""

    SEEN = "seen"  # not a run: the scheduler watches the schedule from this time on
    QUEUED = "queued"  # to be submitted, now or when an older run has ended
    SUBMITTED = "submitted"
    SKIPPED = "skipped"  # the overlap policy skipped it
    MISSED = "missed"  # no scheduler was running when it was due
    FAILED = "failed"  # it could not be submitted


PAUSED = "paused"  # the reason in the row of a schedule whose times pass without runs
RUNS = frozenset(RunState) - {RunState.SEEN}
LOST = frozenset({RunState.MISSED, RunState.FAILED})  # what a user should hear of


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
    """Sort key: by schedule, then by time."""
    return run.schedule, run.logical_at
