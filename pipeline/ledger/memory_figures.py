"""The whole store in a few numbers, in memory: a part of `MemoryStore`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.figures_contract import AUDITED_SEC, MISSED_SEC
from specbatch.pipeline.ledger.memory_schedules import SchedulesInMemory
from specbatch.pipeline.ledger.memory_time import TimeInMemory
from specbatch.pipeline.ledger.memory_units import Unit
from specbatch.schemas.figures import OpenUnits, ScheduleRuns, StoreFigures
from specbatch.schemas.records import Stage
from specbatch.schemas.schedules import LOST, RunState, ScheduleRun


class FiguresInMemory(TimeInMemory, SchedulesInMemory):
    """Under the store's lock."""

    def figures(self) -> StoreFigures:
        with self._lock:
            now = self._now()
            jobs = list(self._jobs.values())
            live = [job for job in jobs if not job.row.state.is_final]
            progress = [job.progress() for job in live]
            units = [
                *(u for job in jobs for u in job.groups.values() if u.stage in rules.OPEN),
                *(j for j in jobs if j.stage in (Stage.INGEST, Stage.PUBLISH) and not j.waits),
            ]
            sessions = [s.row for s in self._sessions.values() if s.row.ended_at is None]
            return StoreFigures(
                units=_by_stage(units, now),
                jobs=Counter(job.row.state for job in live),
                rows_failed=sum(one.rows_failed for one in progress),
                workers=Counter(row.device.kind for row in sessions),
                audited=self.correctness(now - AUDITED_SEC),
                schedules=_schedules(self._schedule_runs.values(), now - MISSED_SEC),
            )


def _by_stage(units: Iterable[Unit], now: float) -> dict[Stage, OpenUnits]:
    by_stage: defaultdict[Stage, list[Unit]] = defaultdict(list)
    for unit in units:
        by_stage[unit.stage].append(unit)
    return {stage: _open(of, now) for stage, of in by_stage.items()}


def _open(units: list[Unit], now: float) -> OpenUnits:
    free = [unit for unit in units if unit.lease_until <= now]
    since = min((max(unit.ready_at, unit.lease_until) for unit in free), default=now)
    return OpenUnits(
        ready=len(free),
        leased=len(units) - len(free),
        stuck=sum(unit.lease_until > 0 for unit in free),
        oldest_sec=now - since,
    )


def _schedules(runs: Iterable[ScheduleRun], since: float) -> dict[str, ScheduleRuns]:
    found: dict[str, ScheduleRuns] = {}
    for run in runs:
        of = found.get(run.schedule, ScheduleRuns())
        if run.state is RunState.SUBMITTED:
            found[run.schedule] = replace(
                of, last_success_at=max(of.last_success_at or run.noted_at, run.noted_at)
            )
        elif run.state in LOST and run.logical_at >= since:
            found[run.schedule] = replace(of, missed=of.missed + 1)
    return found
