"""The audit log of a job: entries that each carry the hash of the one before.

An entry is added inside the transaction that it tells of, while that holds the job's row; so a
job's entries are numbered one after another, and what was not committed is not logged. The job's
row keeps the number and the hash of the last one: else nobody could tell that the last are missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import BindParameter, Connection, insert, select, update

from specbatch.pipeline.audit import entries
from specbatch.pipeline.ledger.sql.transactions import ACTOR, Now
from specbatch.schemas.audit import EntryKind, Head, LogEntry
from specbatch.schemas.audit_tables import AuditLog
from specbatch.schemas.tables import Job


def append(
    conn: Connection,
    now: Now,
    job_id: str,
    kind: EntryKind,
    actor: str | None,
    payload: Mapping[str, Any],
) -> Head:
    """Add an entry to a job's log. The caller holds the job's row (`jobs.lock`).

    `actor` is who did it; None: whoever this store works for. `payload` is plain JSON, and stays
    for ever: nothing of a prompt or an output belongs there, but their digests.
    """
    job = conn.execute(select(*Job.__table__.c).where(Job.job_id == job_id)).one()
    values = link(conn, now, job, kind, payload, actor)
    conn.execute(update(Job).where(Job.job_id == job_id).values(**values))
    return Head(values["log_number"], values["log_head"])


def link(
    conn: Connection,
    now: Now,
    job: Any,
    kind: EntryKind,
    payload: Mapping[str, Any],
    actor: str | None = None,
) -> dict[str, Any]:
    """The same with the job's row as it was locked; returns what that is to be updated with.

    One statement. So who updates the row anyway pays no more for an entry.
    """
    at, who = clock(conn, now, job), actor or actor_of(conn)
    head, added = Head(job.log_number, job.log_head or b""), list[LogEntry]()
    if head.number == 0:  # it was submitted before there was a log
        added.append(
            entries.follow(Head(), job.job_id, EntryKind.ADOPTED, at, who, entries.pinned(job))
        )
        head = added[-1].head
    added.append(entries.follow(head, job.job_id, kind, at, who, payload))
    _insert(conn, added)
    return new_head(added[-1])


def begin(conn: Connection, at: float, values: Mapping[str, Any]) -> LogEntry:
    """The first entry of a job that is to be made of `values`; `write_first` puts it down."""
    return entries.submitted(values, at, actor_of(conn))


def write_first(conn: Connection, entry: LogEntry) -> None:
    """Put down the entry of `begin`, once the job is there."""
    _insert(conn, [entry])


def new_head(entry: LogEntry) -> dict[str, Any]:
    """What the job's row keeps of its log's last entry."""
    return {"log_number": entry.number, "log_head": entry.hash}


def clock(conn: Connection, now: Now, job: Any = None) -> float:
    """The store's time as a number: with a locked row of PostgreSQL, no statement is needed."""
    at: Any = now.value if isinstance(now, BindParameter) else getattr(job, "locked_at", None)
    return float(conn.scalars(select(now)).one() if at is None else at)


def actor_of(conn: Connection) -> str:
    """Whom the store of this connection works for."""
    return str(conn.get_execution_options().get(ACTOR, ""))


def _insert(conn: Connection, added: list[LogEntry]) -> None:
    conn.execute(insert(AuditLog), [entries.values(entry) for entry in added])
