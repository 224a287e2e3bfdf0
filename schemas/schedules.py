"""Runs of schedules: one record per schedule and logical time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class RunState(StrEnum):
    """State of one logical time of a schedule."""

    SEEN = "seen"  # not a run: the scheduler watches the schedule from this time on
    QUEUED = "queued"  # to be submitted, now or when an older run has ended
    SUBMITTED = "submitted"
    RUNNING = "running"  # of other kinds than `job`: a process is at it, or died within the lease
    DONE = "done"  # … and went through
    SKIPPED = "skipped"  # the overlap policy skipped it
    MISSED = "missed"  # no scheduler was running when it was due
    FAILED = "failed"  # it could not be submitted, or did not go through


PAUSED = "paused"  # the reason in the row of a schedule whose times pass without runs
RUNS = frozenset(RunState) - {RunState.SEEN}
LOST = frozenset({RunState.MISSED, RunState.FAILED})  # what a user should hear of
HAD = frozenset({RunState.SUBMITTED, RunState.DONE})
RUN_LEASE_SEC = 60.0  # after which a run that was not heard of is another process's to run


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """One logical time of one schedule. Times are seconds since the epoch."""

    schedule: str
    logical_at: float
    state: RunState
    job_id: str | None = None
    reason: str | None = None
    noted_at: float = 0.0  # by the store's clock, which sets it
    attempts: int = 0  # that were begun, of kinds other than `job`
    started_at: float | None = None  # the newest of them; its writes name it
    found: Mapping[str, Any] | None = None  # figures of a run, for metrics


def in_order(run: ScheduleRun) -> tuple[str, float]:
    """Sort key: by schedule, then by time."""
    return run.schedule, run.logical_at
