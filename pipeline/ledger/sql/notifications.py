"""Notifications in SQL: a queue of events that targets have not heard of yet.

A row is added in the transaction that logs the event, so none is lost. A sender takes a row by
putting its next attempt off for a while: if it dies, another one sends it again after that.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, insert, or_, select, update

from specbatch.pipeline.ledger.sql.transactions import LINEAGE, Now, upsert
from specbatch.schemas import lineage
from specbatch.schemas.mapper import named
from specbatch.schemas.masking import masked
from specbatch.schemas.notifications import ENDS, Due, Event, NotificationRow
from specbatch.schemas.tables import Notification

_DUE = (
    *(Notification.job_id, Notification.number, Notification.target, Notification.event),
    *(Notification.at, Notification.attempts),
)


def add(conn: Connection, now: Now, job: Any, number: int, event: Event) -> None:
    """Queue an event of a locked job, which entry `number` of its log describes."""
    values = {"job_id": job.job_id, "number": number, "event": event.value, "attempts": 0}
    targets = list(job.spec.get("notify", ()))
    if event in ENDS and _tells_lineage(conn):
        targets.append(lineage.TARGET)
    for target in targets:
        conn.execute(insert(Notification).values(**values, target=target, at=now, due_at=now))


def add_start(conn: Connection, now: Now, job_id: str) -> None:
    """Queue, for lineage alone, that a job has started; once, however often it is claimed."""
    if not _tells_lineage(conn):
        return
    values = {"job_id": job_id, "number": 0, "target": lineage.TARGET, "attempts": 0}
    started = upsert(conn.dialect.name, Notification).values(
        **values, event=Event.STARTED.value, at=now, due_at=now
    )
    conn.execute(started.on_conflict_do_nothing())


def _tells_lineage(conn: Connection) -> bool:
    """Whether this connection's store was opened where jobs are told to OpenLineage."""
    return bool(conn.get_execution_options().get(LINEAGE, False))


def due(
    conn: Connection,
    now: Now,
    targets: Collection[str],
    limit: int = 8,
    job_id: str | None = None,
) -> list[Due]:
    """Those of these targets whose next attempt is due, the longest due first."""
    query = select(*_DUE).where(Notification.due_at <= now, Notification.target.in_(list(targets)))
    if job_id is not None:
        query = query.where(Notification.job_id == job_id)
    found = conn.execute(query.order_by(Notification.due_at).limit(limit))
    return [Due(*row[:3], Event(row.event), row.at, row.attempts) for row in found]


def take(conn: Connection, now: Now, one: Due, for_sec: float) -> bool:
    """Whether this caller may send it: nobody else may for `for_sec`.

    What failed and is put off may be taken early. Without an error, somebody is sending it.
    """
    is_put_off = and_(Notification.due_at.is_not(None), Notification.error.is_not(None))
    taken = (
        update(Notification)
        .where(*_is(one), Notification.attempts == one.attempts)
        .where(or_(Notification.due_at <= now, is_put_off))
        .values(attempts=one.attempts + 1, due_at=now + for_sec, error=None)
    )
    return conn.execute(taken).rowcount == 1


def sent(conn: Connection, now: Now, one: Due) -> None:
    conn.execute(update(Notification).where(*_is(one)).values(sent_at=now, due_at=None, error=None))


def not_sent(conn: Connection, now: Now, one: Due, error: str, again_sec: float | None) -> None:
    """Note why. The next attempt is in `again_sec`; None: there is none."""
    due_at = None if again_sec is None else now + again_sec
    unsent = Notification.sent_at.is_(None)
    conn.execute(
        update(Notification).where(*_is(one), unsent).values(due_at=due_at, error=masked(error))
    )


def of_job(conn: Connection, job_id: str) -> list[NotificationRow]:
    """All of a job, in the order of its events."""
    query = (
        select(*Notification.__table__.c)
        .where(Notification.job_id == job_id)
        .order_by(Notification.number, Notification.target)
    )
    found = conn.execute(query)
    return [named(NotificationRow, row, event=Event(row.event)) for row in found]


def _is(one: Due) -> tuple[ColumnElement[bool], ...]:
    return (
        Notification.job_id == one.job_id,
        Notification.number == one.number,
        Notification.target == one.target,
    )
