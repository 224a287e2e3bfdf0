"""The whole store in a few numbers: what `FiguresStore` says, each by an index of what is open."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, case, func, or_, select

from specbatch.pipeline.ledger import audit_reading
from specbatch.pipeline.ledger.figures_contract import AUDITED_SEC, MISSED_SEC
from specbatch.pipeline.ledger.transactions import Now, Transactions
from specbatch.schemas.figures import OpenUnits, ScheduleRuns, StoreFigures
from specbatch.schemas.records import JobState, Stage
from specbatch.schemas.schedule_tables import ScheduleRun
from specbatch.schemas.schedules import LOST, RunState
from specbatch.schemas.tables import Group, Job, group_is_open, job_is_due, job_is_live
from specbatch.schemas.time_tables import WorkerSession


class FiguresInSql:
    """The part of `SqlStore` beside jobs and leases."""

    _db: Transactions

    def figures(self) -> StoreFigures:
        return self._db.read(lambda conn: figures(conn, self._db.now()))


def figures(conn: Connection, now: Now) -> StoreFigures:
    at: float = conn.scalar(select(now)) or 0.0
    return StoreFigures(
        units=_units(conn, now, at),
        jobs=_jobs(conn),
        rows_failed=_rows_failed(conn),
        workers=_workers(conn),
        audited=audit_reading.correctness(conn, at - AUDITED_SEC),
        schedules=_schedules(conn, at - MISSED_SEC),
    )


def _units(conn: Connection, now: Now, at: float) -> dict[Stage, OpenUnits]:
    groups = select(*_open(Group, now)).where(group_is_open()).group_by(Group.stage)
    jobs = (
        select(*_open(Job, now))
        .where(job_is_due(), Job.ingest_resumes_at.is_(None))
        .group_by(Job.stage)
    )
    found = [*conn.execute(groups), *conn.execute(jobs)]
    return {
        Stage(row.stage): OpenUnits(
            ready=int(row.ready),
            leased=int(row.leased),
            stuck=int(row.stuck),
            oldest_sec=0.0 if row.since is None else max(0.0, at - row.since),
        )
        for row in found
    }


def _open(table: type[Group] | type[Job], now: Now) -> list[Any]:
    free, until = table.lease_until <= now, table.lease_until
    since = case((free & (until > table.ready_at), until), (free, table.ready_at))
    return [
        table.stage,
        func.sum(case((free, 1), else_=0)).label("ready"),
        func.sum(case((free, 0), else_=1)).label("leased"),
        func.sum(case((free & (until > 0), 1), else_=0)).label("stuck"),
        func.min(since).label("since"),
    ]


def _jobs(conn: Connection) -> dict[JobState, int]:
    """Each half by an index of its own."""
    found: dict[JobState, int] = {}
    for is_some in (job_is_live(), job_is_due() & (Job.stage == Stage.PUBLISH.value)):
        rows = conn.execute(select(Job.state, func.count()).where(is_some).group_by(Job.state))
        for state, count in rows:
            found[JobState(state)] = found.get(JobState(state), 0) + int(count)
    return found


def _rows_failed(conn: Connection) -> int:
    failed = case((Group.stage == Stage.FAILED.value, Group.rows), else_=Group.rows_failed)
    is_open = or_(job_is_live(), job_is_due())
    of_groups = (
        select(func.coalesce(func.sum(failed), 0))
        .join(Job, Job.job_id == Group.job_id)
        .where(is_open)
    )
    rejected = select(func.coalesce(func.sum(Job.rows_rejected), 0)).where(is_open)
    return int(conn.scalar(of_groups) or 0) + int(conn.scalar(rejected) or 0)


def _workers(conn: Connection) -> dict[str, int]:
    is_there = WorkerSession.ended_at.is_(None)
    kinds = select(WorkerSession.device_kind, func.count()).where(is_there)
    return {kind: int(n) for kind, n in conn.execute(kinds.group_by(WorkerSession.device_kind))}


def _schedules(conn: Connection, since: float) -> dict[str, ScheduleRuns]:
    """A row a night: a few thousand in all, of which the lost ones are looked for by their time."""
    submitted = (
        select(ScheduleRun.schedule, func.max(ScheduleRun.noted_at))
        .where(ScheduleRun.state == RunState.SUBMITTED.value)
        .group_by(ScheduleRun.schedule)
    )
    lost = (
        select(ScheduleRun.schedule, func.count())
        .where(ScheduleRun.logical_at >= since)
        .where(ScheduleRun.state.in_([state.value for state in LOST]))
        .group_by(ScheduleRun.schedule)
    )
    last = {name: float(at) for name, at in conn.execute(submitted)}
    missed = {name: int(count) for name, count in conn.execute(lost)}
    return {
        name: ScheduleRuns(last.get(name), missed.get(name, 0)) for name in sorted({*last, *missed})
    }
