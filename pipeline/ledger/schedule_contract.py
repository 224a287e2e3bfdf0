"""What a store must do for schedules. Part of the contract in `contract.py`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from specbatch.schemas.schedules import RUNS, RunState, ScheduleRun


class ScheduleStore(Protocol):
    """One row per schedule and logical time, whoever notes it first."""

    def note_schedule_run(self, run: ScheduleRun, replaces: Collection[RunState] = ()) -> bool:
        """Note what became of a time; whether it was noted.

        A time that has a row keeps it, unless that row's state is one of `replaces`. Of several who
        note a time at once exactly one does. `noted_at` is the store's own time.
        """
        ...

    def note_schedule_runs(
        self, runs: Sequence[ScheduleRun], then: Sequence[ScheduleRun] = ()
    ) -> list[ScheduleRun]:
        """Note several times that have no rows, in one transaction; those that were noted.

        If there are any, rows of `then` take the place of queued ones, and are returned as well.
        """
        ...

    def schedule_runs(
        self,
        name: str | None = None,
        limit: int = 100,
        states: Collection[RunState] = RUNS,
        logical_at: float | None = None,
        by_noted: bool = False,
        upto: float | None = None,
    ) -> list[ScheduleRun]:
        """The newest times of a schedule, or of all; of the same time by the schedule's name.

        With `logical_at` only that time, with `upto` none after it. With `by_noted` those that were
        noted last instead.
        """
        ...
