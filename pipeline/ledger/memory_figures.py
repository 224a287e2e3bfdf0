"""The whole store in a few numbers, in memory: a part of `MemoryStore`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from specbatch.pipeline.ledger.figures_contract import AUDITED_SEC, MISSED_SEC
from specbatch.pipeline.ledger.memory_reporting import ReportingInMemory
from specbatch.pipeline.ledger.memory_schedules import SchedulesInMemory
from specbatch.schemas.figures import ScheduleRuns, StoreFigures
from specbatch.schemas.schedules import LOST, RunState, ScheduleRun


class FiguresInMemory(ReportingInMemory, SchedulesInMemory):
    """Under the store's lock."""

    def figures(self) -> StoreFigures:
        with self._lock:
            look = self.backlog()
            return StoreFigures(
                backlog=look,
                audited=self.correctness(look.at - AUDITED_SEC),
                schedules=_schedules(self._schedule_runs.values(), look.at - MISSED_SEC),
            )


def _schedules(runs: Iterable[ScheduleRun], since: float) -> dict[str, ScheduleRuns]:
    found: dict[str, ScheduleRuns] = {}
    for run in runs:
        of = found.get(run.schedule, ScheduleRuns())
        if run.state is RunState.SEEN:
            found[run.schedule] = of
        elif run.state is RunState.SUBMITTED:
            found[run.schedule] = replace(
                of, last_success_at=max(of.last_success_at or run.noted_at, run.noted_at)
            )
        elif run.state in LOST and run.logical_at >= since:
            found[run.schedule] = replace(of, missed=of.missed + 1)
    return found
