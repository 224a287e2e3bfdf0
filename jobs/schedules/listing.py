"""The state of schedules, for users and programs, read from files and the store."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from specbatch.jobs.schedules.definition import Schedule
from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import JobNotFoundError
from specbatch.schemas.records import JobState
from specbatch.schemas.schedules import HAD, LOST, RunState, ScheduleRun

_LOOKED_BACK = 1000  # rows of a schedule


@dataclass(frozen=True, slots=True)
class Standing:
    """The current state of one schedule."""

    schedule: Schedule
    next_at: float | None  # None: it is paused
    last: ScheduleRun | None  # the newest time that has a row
    job_state: JobState | None  # of its job
    waiting: int  # times that are queued
    lost: int  # times missed or failed since one last went through
    overdue_since: float | None  # a due time that no scheduler has handled

    @property
    def is_well(self) -> bool:
        """Whether the newest time ran and none was missed since one last went through."""
        return not self.lost and self.overdue_since is None

    @property
    def words(self) -> str:
        """The state in a few words."""
        counts = [f"{self.waiting:,} waiting"] * (self.waiting > 0)
        counts += [f"{self.lost:,} missed or failed"] * (self.lost > 0)
        return "; ".join([self._state, *counts])

    @property
    def _state(self) -> str:
        if self.overdue_since is not None:
            since = self._local(self.overdue_since)
            return f"overdue since {since}: is `specbatch scheduler` running?"
        if self.schedule.fields.paused:
            return "paused"
        if self.last is None:
            return "no time has come yet"
        if self.job_state is not None:
            return f"submitted, job {self.last.job_id} {self.job_state}"
        return f"{self.last.state}" + (f": {self.last.reason}" if self.last.reason else "")

    def as_json(self) -> dict[str, Any]:
        """The object of `specbatch schedules --json`."""
        last = self.last
        return {
            "schedule": self.schedule.name,
            "file": str(self.schedule.file),
            "kind": self.schedule.fields.kind,
            "cron": self.schedule.fields.cron,
            "time_zone": self.schedule.fields.time_zone,
            "paused": self.schedule.fields.paused,
            "next": self._iso(self.next_at),
            "last": self._iso(last.logical_at if last else None),
            "state": last and str(last.state),
            "job": last and last.job_id,
            "job_state": self.job_state and str(self.job_state),
            "reason": last and last.reason,
            "waiting": self.waiting,
            "lost": self.lost,
            "overdue_since": self._iso(self.overdue_since),
        }

    def _iso(self, at: float | None) -> str | None:
        return None if at is None else self.schedule.times.local(at).isoformat()

    def _local(self, at: float) -> str:
        return local_words(self.schedule.times.local(at))


def local_words(at: datetime) -> str:
    """`2026-03-29 03:00 CEST`: minutes suffice, and the zone distinguishes doubled hours."""
    return f"{at:%Y-%m-%d %H:%M} {at:%Z}"


def standing(schedule: Schedule, store: Store, now: float) -> Standing:
    """The state of a schedule at `now`."""
    rows = store.schedule_runs(schedule.name, _LOOKED_BACK, upto=now)
    last = rows[0] if rows else None
    lost = 0
    for row in rows:
        if row.state in HAD:
            break
        lost += row.state in LOST
    return Standing(
        schedule,
        None if schedule.fields.paused else next(schedule.times.after(now), None),
        last,
        _job_state(store, last),
        sum(row.state is RunState.QUEUED for row in rows),
        lost,
        _overdue_since(schedule, store, last, now),
    )


def _job_state(store: Store, run: ScheduleRun | None) -> JobState | None:
    if run is None or run.job_id is None:
        return None
    try:
        return store.get_job(run.job_id).state
    except JobNotFoundError:
        return None


def _overdue_since(
    schedule: Schedule, store: Store, last: ScheduleRun | None, now: float
) -> float | None:
    """The first time without a row, if it passed longer ago than the grace."""
    seen = store.schedule_runs(schedule.name, 1, {RunState.SEEN}, upto=now)
    if schedule.fields.paused or not seen or seen[0].reason != schedule.timing:
        return None
    known = max([seen[0].logical_at, *([last.logical_at] if last else [])])
    first = next(schedule.times.after(known), None)
    late = first is not None and first + schedule.fields.grace_sec < now
    return first if late else None
