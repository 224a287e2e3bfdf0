"""The whole store in a few numbers, in memory: a part of `MemoryStore`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from specbatch.pipeline.ledger.figures_contract import AUDITED_SEC, MISSED_SEC, SUCCESS_SEC
from specbatch.pipeline.ledger.memory.reporting import ReportingInMemory
from specbatch.pipeline.ledger.memory.schedules import SchedulesInMemory
from specbatch.schemas.figures import ScheduleRuns, StoreFigures
from specbatch.schemas.schedules import LOST, PAUSED, RunState, ScheduleRun, in_order


class FiguresInMemory(ReportingInMemory, SchedulesInMemory):
    """Under the store's lock."""

    def figures(self) -> StoreFigures:
        with self._lock:
            look = self.backlog()
            return StoreFigures(
                backlog=look,
                audited=self.correctness(look.at - AUDITED_SEC),
                schedules=_schedules(self._schedule_runs.values(), look.at),
            )


def _schedules(runs: Iterable[ScheduleRun], at: float) -> dict[str, ScheduleRuns]:
    in_turn = sorted(runs, key=in_order)
    known = {run.schedule: run.reason for run in in_turn if run.state is RunState.SEEN}
    paused = {name for name, timing in known.items() if timing == PAUSED}
    found = {name: ScheduleRuns() for name in known.keys() - paused}
    for run in in_turn:
        of = found.get(run.schedule, ScheduleRuns())
        if run.state is RunState.SUBMITTED:
            if run.schedule not in paused and run.noted_at >= at - SUCCESS_SEC:
                last = max(of.last_success_at or run.noted_at, run.noted_at)
                found[run.schedule] = replace(of, last_success_at=last)
        elif run.state in LOST and run.logical_at >= at - MISSED_SEC:
            found[run.schedule] = replace(of, missed=of.missed + 1)
    return found
