"""Times of schedules in SQL: one row per schedule and logical time."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import Connection, and_, or_, select, update

from specbatch.pipeline.ledger.sql.transactions import Now, upsert
from specbatch.schemas.mapper import named
from specbatch.schemas.masking import masked
from specbatch.schemas.schedules import RUN_LEASE_SEC, RUNS, RunState, ScheduleRun, in_order
from specbatch.schemas.tables import ScheduleRun as Table


def note(conn: Connection, now: Now, run: ScheduleRun, replaces: Collection[RunState] = ()) -> bool:
    """One statement, so that of several callers at once exactly one succeeds."""
    values = {
        "state": run.state.value,
        "job_id": run.job_id,
        "reason": run.reason and masked(run.reason),
        "noted_at": now,
        "attempts": run.attempts,
    }
    statement = upsert(conn.dialect.name, Table).values(
        schedule=run.schedule, logical_at=run.logical_at, **values
    )
    statement = statement.on_conflict_do_update(
        index_elements=["schedule", "logical_at"],
        set_=values,
        where=Table.state.in_([state.value for state in replaces]),
    )
    return conn.execute(statement.returning(Table.schedule)).first() is not None


def note_all(
    conn: Connection, now: Now, runs: Sequence[ScheduleRun], then: Sequence[ScheduleRun] = ()
) -> list[ScheduleRun]:
    """One order everywhere, so that two callers never deadlock."""
    noted = [run for run in sorted(runs, key=in_order) if note(conn, now, run, ())]
    if noted:
        queued = {RunState.QUEUED}
        noted += [run for run in sorted(then, key=in_order) if note(conn, now, run, queued)]
    return noted


def claim(conn: Connection, now: Now, run: ScheduleRun) -> ScheduleRun | None:
    """One statement: of several callers at once one has it."""
    silent = and_(Table.state == RunState.RUNNING.value, Table.noted_at < now - RUN_LEASE_SEC)
    statement = (
        update(Table)
        .where(Table.schedule == run.schedule, Table.logical_at == run.logical_at)
        .where(or_(Table.state == RunState.QUEUED.value, silent))
        .values(
            state=RunState.RUNNING.value,
            attempts=Table.attempts + 1,
            started_at=now,
            noted_at=now,
        )
        .returning(*Table.__table__.c)
    )
    row = conn.execute(statement).first()
    return None if row is None else named(ScheduleRun, row, state=RunState(row.state))


def hold(conn: Connection, now: Now, run: ScheduleRun) -> bool:
    """Whether the row was still this attempt's."""
    statement = (
        update(Table)
        .where(Table.schedule == run.schedule, Table.logical_at == run.logical_at)
        .where(Table.state == RunState.RUNNING.value, Table.started_at == run.started_at)
        .values(
            state=run.state.value,
            reason=run.reason and masked(run.reason),
            found=run.found,
            noted_at=now,
            # One that is given back was no attempt.
            attempts=Table.attempts - (1 if run.state is RunState.QUEUED else 0),
        )
        .returning(Table.schedule)
    )
    return conn.execute(statement).first() is not None


def newest(
    conn: Connection,
    name: str | None = None,
    limit: int = 100,
    states: Collection[RunState] = RUNS,
    logical_at: float | None = None,
    by_noted: bool = False,
    upto: float | None = None,
) -> list[ScheduleRun]:
    query = select(*Table.__table__.c).where(Table.state.in_([state.value for state in states]))
    if name is not None:
        query = query.where(Table.schedule == name)
    if logical_at is not None:
        query = query.where(Table.logical_at == logical_at)
    if upto is not None:
        query = query.where(Table.logical_at <= upto)
    if by_noted:
        query = query.order_by(Table.noted_at.desc())
    query = query.order_by(Table.logical_at.desc(), Table.schedule).limit(limit)
    return [named(ScheduleRun, row, state=RunState(row.state)) for row in conn.execute(query)]
