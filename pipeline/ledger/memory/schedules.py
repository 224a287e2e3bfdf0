"""Times of schedules in memory: the twin of `sql/schedules.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from specbatch.pipeline.ledger.memory.chain import ChainInMemory
from specbatch.schemas.masking import masked
from specbatch.schemas.schedules import RUNS, RunState, ScheduleRun, in_order


class SchedulesInMemory(ChainInMemory):
    """What became of each time of each schedule, under the store's lock."""

    def __init__(
        self,
        max_attempts: int = 3,
        clock: Callable[[], float] = time.time,
        weights: Mapping[str, float] | None = None,
        actor: str | None = None,
    ) -> None:
        super().__init__(max_attempts, clock, weights, actor)
        self._schedule_runs: dict[tuple[str, float], ScheduleRun] = {}

    def note_schedule_run(self, run: ScheduleRun, replaces: Collection[RunState] = ()) -> bool:
        with self._lock:
            key = (run.schedule, run.logical_at)
            known = self._schedule_runs.get(key)
            if known is not None and known.state not in replaces:
                return False
            reason = run.reason and masked(run.reason)
            self._schedule_runs[key] = replace(run, reason=reason, noted_at=self._now())
            return True

    def note_schedule_runs(
        self, runs: Sequence[ScheduleRun], then: Sequence[ScheduleRun] = ()
    ) -> list[ScheduleRun]:
        with self._lock:
            noted = [run for run in sorted(runs, key=in_order) if self.note_schedule_run(run)]
            if noted:
                queued = {RunState.QUEUED}
                later = sorted(then, key=in_order)
                noted += [run for run in later if self.note_schedule_run(run, queued)]
            return noted

    def schedule_runs(
        self,
        name: str | None = None,
        limit: int = 100,
        states: Collection[RunState] = RUNS,
        logical_at: float | None = None,
        by_noted: bool = False,
        upto: float | None = None,
    ) -> list[ScheduleRun]:
        with self._lock:
            found = [
                run
                for run in self._schedule_runs.values()
                if run.state in states
                if name in (None, run.schedule) and logical_at in (None, run.logical_at)
                if upto is None or run.logical_at <= upto
            ]
            found.sort(key=lambda run: (-run.logical_at, run.schedule))
            if by_noted:
                found.sort(key=lambda run: -run.noted_at)  # of one moment in the order they have
            return found[:limit]
