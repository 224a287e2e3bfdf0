"""The whole store in a few numbers: what `FiguresStore` says, each by an index of what is open."""

from __future__ import annotations

from sqlalchemy import Connection, and_, func, select

from specbatch.pipeline.ledger.figures_contract import AUDITED_SEC, MISSED_SEC, SUCCESS_SEC
from specbatch.pipeline.ledger.sql import audit_reading
from specbatch.pipeline.ledger.sql.backlog import backlog
from specbatch.pipeline.ledger.sql.transactions import Now, Transactions
from specbatch.schemas.figures import ScheduleRuns, StoreFigures
from specbatch.schemas.schedule_tables import ScheduleRun
from specbatch.schemas.schedules import LOST, PAUSED, RunState


class FiguresInSql:
    """The part of `SqlStore` beside jobs and leases."""

    _db: Transactions

    def figures(self) -> StoreFigures:
        return self._db.read(lambda conn: figures(conn, self._db.now()))


def figures(conn: Connection, now: Now) -> StoreFigures:
    look = backlog(conn, now)
    return StoreFigures(
        backlog=look,
        audited=audit_reading.correctness(conn, look.at - AUDITED_SEC),
        schedules=_schedules(conn, look.at),
    )


def _schedules(conn: Connection, at: float) -> dict[str, ScheduleRuns]:
    """A row a night: a few thousand in all, of which the lost ones are looked for by their time."""
    submitted = (
        select(ScheduleRun.schedule, func.max(ScheduleRun.noted_at))
        .where(ScheduleRun.state == RunState.SUBMITTED.value)
        .where(ScheduleRun.noted_at >= at - SUCCESS_SEC)
        .group_by(ScheduleRun.schedule)
    )
    lost = (
        select(ScheduleRun.schedule, func.count())
        .where(ScheduleRun.logical_at >= at - MISSED_SEC)
        .where(ScheduleRun.state.in_([state.value for state in LOST]))
        .group_by(ScheduleRun.schedule)
    )
    newest = (
        select(ScheduleRun.schedule, func.max(ScheduleRun.logical_at).label("logical_at"))
        .where(ScheduleRun.state == RunState.SEEN.value)
        .group_by(ScheduleRun.schedule)
        .subquery()
    )
    same = and_(
        ScheduleRun.schedule == newest.c.schedule, ScheduleRun.logical_at == newest.c.logical_at
    )
    seen = select(ScheduleRun.schedule, ScheduleRun.reason).join(newest, same)
    known = {row.schedule: row.reason for row in conn.execute(seen)}
    paused = {name for name, timing in known.items() if timing == PAUSED}
    last = {name: float(when) for name, when in conn.execute(submitted) if name not in paused}
    missed = {name: int(count) for name, count in conn.execute(lost)}
    names = {*last, *missed, *(known.keys() - paused)}
    return {name: ScheduleRuns(last.get(name), missed.get(name, 0)) for name in sorted(names)}
