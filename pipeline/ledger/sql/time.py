"""Device time in SQL: sessions, the slices that attempts used of them, and their sums.

Each function runs inside a transaction that the caller opened. Lock order: the job's row, its
groups, then a session's row, then its slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Executable,
    Select,
    Update,
    bindparam,
    case,
    cast,
    exists,
    false,
    func,
    literal_column,
    or_,
    select,
    update,
)
from sqlalchemy.dialects import postgresql

from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.sql.transactions import Now, Transactions, upsert
from specbatch.schemas import time_mapper
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.provenance import Ticks
from specbatch.schemas.records import Lease
from specbatch.schemas.tables import Completion, Group, TimeSlice, WorkerSession
from specbatch.schemas.timekeeping import (
    HINTS,
    Attempt,
    JobTime,
    NewSession,
    RowTime,
    SessionRow,
    SessionTime,
    Spent,
)
from specbatch.schemas.timekeeping import TimeSlice as Slice

_COUNTERS = ("seen_ticks", "idle_ticks", "overhead_ticks")
_KINDS = tuple(f"{kind}_ticks" for kind in Ticks.__slots__)
_KEY = (TimeSlice.job_id, TimeSlice.group_index, TimeSlice.generation, TimeSlice.session_id)
_PAGE = 1000

# Of a slice joined with its group: whether somebody holds that attempt.
IN_FLIGHT: ColumnElement[bool] = func.coalesce(
    (Group.generation == TimeSlice.generation) & Group.lease_owner.is_not(None), false()
)

# --- writing --------------------------------------------------------------------------------


def begin(conn: Connection, now: Now, session: NewSession) -> None:
    conn.execute(
        upsert(conn.dialect.name, WorkerSession)
        .values(**time_mapper.session_values(session, now))
        .on_conflict_do_nothing()
    )


def announce(conn: Connection, _now: Now, session_id: str, serves: Serves) -> None:
    conn.execute(
        update(WorkerSession)
        .where(WorkerSession.session_id == session_id)
        .values(serves=serves.as_json())
    )


def report(
    conn: Connection, now: Now, session: SessionTime, attempts: Mapping[Attempt, Ticks]
) -> None:
    """Raises `SessionEndedError`."""
    if conn.execute(_touching(now), _counters(session)).rowcount != 1:
        raise rules.session_ended(session.session_id)
    _add(conn, session.session_id, attempts, kept=False)


def keep(conn: Connection, now: Now, lease: Lease, spent: Spent) -> None:
    """Store an attempt's time in the transaction of its results. Raises `SessionEndedError`."""
    session = SessionTime(spent.session_id, spent.seen)
    if conn.dialect.name != "postgresql":
        report(conn, now, session, {})
        _add(conn, spent.session_id, {Attempt.of(lease): spent.ticks}, kept=True)
        return
    values = time_mapper.slice_values(spent.session_id, Attempt.of(lease), spent.ticks, kept=True)
    own = {f"own_{name}": value for name, value in values.items()}
    if conn.execute(_keeping(now), {**_counters(session), **own}).first() is None:
        raise rules.session_ended(spent.session_id)


def end(
    conn: Connection, now: Now, session: SessionTime, attempts: Mapping[Attempt, Ticks]
) -> None:
    """A session that has ended does not change."""
    if _lock(conn, session.session_id) is not None:
        report(conn, now, session, attempts)
        _close(conn, now, session.session_id)


def silent(conn: Connection, now: Now, patience_sec: float) -> Sequence[str]:
    return conn.scalars(
        select(WorkerSession.session_id).where(*_is_silent(now, patience_sec))
    ).all()


def end_silent(conn: Connection, now: Now, session_id: str, patience_sec: float) -> bool:
    """Whether this call ended it: it may have reported meanwhile."""
    if _lock(conn, session_id, *_is_silent(now, patience_sec)) is None:
        return False
    _close(conn, now, session_id)
    return True


def _is_silent(now: Now, patience_sec: float) -> tuple[ColumnElement[bool], ...]:
    return WorkerSession.ended_at.is_(None), WorkerSession.beat_at <= now - patience_sec


def _lock(conn: Connection, session_id: str, *conditions: ColumnElement[bool]) -> Any:
    """Lock an open session's row against all other writers of its time."""
    query = select(WorkerSession.session_id).where(
        WorkerSession.session_id == session_id, WorkerSession.ended_at.is_(None), *conditions
    )
    return conn.execute(query.with_for_update()).first()


def _close(conn: Connection, now: Now, session_id: str) -> None:
    """The session's row is locked, so none of its counters changes meanwhile."""
    row = conn.execute(_sessions().where(WorkerSession.session_id == session_id)).one()
    known = time_mapper.session_row(row)
    leased, lost = rules.leased_and_lost(known.seen, known.accounted)
    conn.execute(
        update(WorkerSession)
        .where(WorkerSession.session_id == session_id)
        .values(ended_at=now, leased_ticks=leased, lost_ticks=lost)
    )


def _counters(session: SessionTime) -> dict[str, Any]:
    """Parameters of `_touching`."""
    counters = zip(_COUNTERS, session[1:], strict=True)
    return {"of_session": session.session_id, **{f"new_{name}": n for name, n in counters}}


@lru_cache(maxsize=16)
def _keeping(now: Now) -> Executable:
    """A session's counters with one attempt's time in one statement: one round trip."""
    touched = _touching(now).returning(WorkerSession.session_id).cte("touched")
    columns = {column.name: column for column in TimeSlice.__table__.c}
    own: dict[str, Any] = {
        name: bindparam(f"own_{name}", type_=column.type) for name, column in columns.items()
    }
    row = select(*(cast(value, columns[name].type) for name, value in own.items()))
    insert = postgresql.insert(TimeSlice)
    grown = _growing(insert.from_select(list(own), row.select_from(touched)))
    return grown.returning(TimeSlice.session_id)


@lru_cache(maxsize=16)
def _touching(now: Now) -> Update:
    """The update of an open session. The statement is cached: every group ends with it."""
    this: BindParameter[str] = bindparam("of_session")
    larger = {name: _larger(getattr(WorkerSession, name), f"new_{name}") for name in _COUNTERS}
    return (
        update(WorkerSession)
        .where(WorkerSession.session_id == this, WorkerSession.ended_at.is_(None))
        .values(beat_at=now, **larger)
    )


def _larger(column: Any, name: str) -> ColumnElement[int]:
    new = bindparam(name, type_=column.type)
    return case((new > column, new), else_=column)


def _add(conn: Connection, session_id: str, attempts: Mapping[Attempt, Ticks], kept: bool) -> None:
    values = [
        time_mapper.slice_values(session_id, attempt, ticks, kept)
        for attempt, ticks in sorted(attempts.items())
    ]
    if values:
        conn.execute(_adding(conn.dialect.name), values)


@lru_cache(maxsize=2)
def _adding(dialect: str) -> Executable:
    return _growing(upsert(dialect, TimeSlice))


def _growing(statement: Any) -> postgresql.Insert:
    """An insert that keeps the larger counters where there is a row already."""
    new = statement.excluded
    larger = {
        name: case(
            (new[name] > getattr(TimeSlice, name), new[name]), else_=getattr(TimeSlice, name)
        )
        for name in _KINDS
    }
    kept = or_(TimeSlice.kept, new["kept"])
    key = [column.name for column in _KEY]
    grown: postgresql.Insert = statement.on_conflict_do_update(
        index_elements=key, set_={**larger, "kept": kept}
    )
    return grown


# --- reading --------------------------------------------------------------------------------


def sessions(
    conn: Connection, job_id: str | None = None, session_id: str | None = None
) -> list[SessionRow]:
    query = _sessions()
    if session_id is not None:
        query = query.where(WorkerSession.session_id == session_id)
    if job_id is not None:
        of_session = TimeSlice.session_id == WorkerSession.session_id
        query = query.where(exists().where(of_session, TimeSlice.job_id == job_id))
    query = query.order_by(WorkerSession.started_at, WorkerSession.session_id)
    return [time_mapper.session_row(row) for row in conn.execute(query)]


def _sessions() -> Any:
    spent = (
        select(func.coalesce(func.sum(sum(getattr(TimeSlice, name) for name in _KINDS)), 0))
        .where(TimeSlice.session_id == WorkerSession.session_id)
        .correlate(WorkerSession)
        .scalar_subquery()
    )
    return select(*WorkerSession.__table__.c, spent.label("spent_ticks"))


def slices(
    database: Transactions, job_id: str | None = None, session_id: str | None = None
) -> Iterator[Slice]:
    """A page at a time."""
    device = [getattr(WorkerSession, name) for name in time_mapper.DEVICE]
    query = with_groups(select(*TimeSlice.__table__.c, *device, IN_FLIGHT.label("in_flight")))
    if job_id is not None:
        query = query.where(TimeSlice.job_id == job_id)
    if session_id is not None:
        query = query.where(TimeSlice.session_id == session_id)
    for rows in database.pages(query, _KEY, _PAGE):
        yield from map(time_mapper.time_slice, rows)


def with_groups(query: Select[Any]) -> Select[Any]:
    """Slices with their sessions, and with their groups where there are any."""
    of_group = (Group.job_id == TimeSlice.job_id) & (Group.group_index == TimeSlice.group_index)
    return (
        query.select_from(TimeSlice)
        .join(WorkerSession, WorkerSession.session_id == TimeSlice.session_id)
        .outerjoin(Group, of_group)
    )


# --- sums -----------------------------------------------------------------------------------


def job_times(conn: Connection, job_id: str | None = None) -> list[JobTime]:
    of: dict[str, Any] = {
        "job_id": TimeSlice.job_id,
        "stage": TimeSlice.stage,
        "price_microusd": WorkerSession.price_microusd,
        "kept": TimeSlice.kept,
        "in_flight": IN_FLIGHT,
        # No parameter: one in SELECT would not be known for the same as one in GROUP BY.
        "hints": TimeSlice.generation == literal_column(str(HINTS)),
    }
    named = [column.label(name) for name, column in of.items()]
    query = with_groups(select(*named, *_sums(TimeSlice))).group_by(*of.values())
    if job_id is not None:
        query = query.where(TimeSlice.job_id == job_id)
    found = [time_mapper.job_time(row) for row in conn.execute(query)]
    return sorted(
        found, key=lambda t: (t.job_id, t.price_microusd, t.kept, t.in_flight, t.hints, t.stage)
    )


def row_times(conn: Connection, job_id: str | None = None) -> list[RowTime]:
    of = (
        Completion.job_id,
        Completion.tag,
        Completion.price_microusd,
        Completion.ahead_price_microusd,
    )
    first = Completion.sample_index == 0
    query = select(
        *of,
        *_sums(Completion),
        func.sum(Completion.ahead_ticks).label("ahead_ticks"),
        func.sum(case((first, 1), else_=0)).label("documents"),
        func.count().label("completions"),
        func.sum(case((first, Completion.prompt_tokens), else_=0)).label("prompt_tokens"),
        func.sum(_tokens(conn)).label("completion_tokens"),
        func.sum(Completion.accepted).label("accepted"),
    ).group_by(*of)
    if job_id is not None:
        query = query.where(Completion.job_id == job_id)
    found = [time_mapper.row_time(row) for row in conn.execute(query)]
    return sorted(
        found, key=lambda t: (t.job_id, t.tag or "", t.price_microusd, t.ahead_price_microusd)
    )


def _tokens(conn: Connection) -> ColumnElement[int]:
    """The tokens of a completion; of a purged one by its origins, which stay."""
    if conn.dialect.name != "postgresql":
        return func.json_array_length(Completion.origins)
    kept = func.cardinality(Completion.logprobs)  # quicker than to unpack
    return case(
        (kept > 0, kept), else_=func.cardinality(func.specbatch_origins(Completion.origins))
    )


def _sums(table: type[TimeSlice] | type[Completion]) -> list[Any]:
    return [func.sum(getattr(table, name)).label(name) for name in _KINDS]
