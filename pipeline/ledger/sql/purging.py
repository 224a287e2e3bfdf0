"""Empties a job's stored texts.

A purge only writes: its user need not be allowed to read texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import (
    Connection,
    Double,
    Select,
    literal,
    literal_column,
    null,
    or_,
    select,
    tuple_,
    update,
)

from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.contract import MOST_JOBS
from specbatch.pipeline.ledger.sql import audit_log, jobs, reusing
from specbatch.pipeline.ledger.sql.transactions import Now, Transactions
from specbatch.schemas import mapper
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.records import JobRow, JobState
from specbatch.schemas.tables import Completion, Group, Job, Rejected

_FINAL = [state.value for state in JobState if state.is_final]
_EMPTY: Any = literal_column("''")  # not encrypted: it holds nothing


def ended_jobs(
    conn: Connection,
    now: Now,
    age_sec: float,
    tenant: str | None = None,
    limit: int = MOST_JOBS,
    private_only: bool = False,
    after: JobRow | None = None,
    within_sec: float | None = None,
) -> list[JobRow]:
    query = _ended(now - age_sec).limit(limit)
    if tenant is not None:
        query = query.where(Job.tenant == tenant)
    if private_only:
        query = query.where(Job.privacy != PrivacyMode.FULL.value)
    if within_sec is not None:
        query = query.where(Job.finished_at >= now - within_sec)
    if after is not None:
        last = (literal(after.finished_at, Double), literal(after.job_id))
        query = query.where(tuple_(Job.finished_at, Job.job_id) > tuple_(*last))
    return [mapper.job_row(row) for row in conn.execute(query)]


def purge(
    db: Transactions, job_id: str, why: str, batch_rows: int = 1000, unfinished: bool = False
) -> Iterator[int]:
    found, at, rows = db.write(lambda conn: _begin(conn, db.now(), job_id, why))
    if at is not None:
        yield at
    while at is not None:
        after = at + batch_rows if at + batch_rows < rows else None
        begin, upto = at, rows if unfinished and after is None else after
        db.write(lambda conn: _empty_rows(conn, found, begin, upto))  # noqa: B023 - called at once
        yield rows if after is None else after
        at = after


def _ended(before: Now) -> Select[Any]:
    return (
        select(*Job.__table__.c)
        .where(Job.state.in_(_FINAL), Job.finished_at <= before)
        .where(or_(Job.purged_at.is_(None), Job.purged_to.is_not(None)))
        .order_by(Job.finished_at, Job.job_id)
    )


def _begin(conn: Connection, now: Now, job_id: str, why: str) -> tuple[str, int | None, int]:
    """(whole id, row to continue from or None, rows), after the entry in the log."""
    row = jobs.lock(conn, jobs.find(conn, job_id).job_id)
    rules.check_purge(mapper.job_row(row))
    if row.purged_at is not None:
        return row.job_id, row.purged_to, row.next_row
    said = {"rows": None, "why": why, "output": False}
    head = audit_log.link(conn, now, row, EntryKind.PURGED, said)
    emptied = {"sealed_spec": null(), "last_error": null()}
    conn.execute(
        update(Job)
        .where(Job.job_id == row.job_id)
        .values(purged_at=now, purged_to=0, **emptied, **head)
    )
    conn.execute(update(Group).where(Group.job_id == row.job_id).values(last_error=null()))
    reusing.forget(conn, row.job_id)
    return row.job_id, 0, row.next_row


def _empty_rows(conn: Connection, job_id: str, begin: int, after: int | None) -> None:
    """Rows from `begin` on, to before `after` or all of them."""
    conn.execute(
        update(Completion)
        .where(*_rows(Completion, job_id, begin, after))
        .values(
            row_id=_EMPTY,
            text=_EMPTY,
            token_ids=(),
            logprobs=(),
            top_token_ids=null(),
            top_logprobs=null(),
            rejected=null(),
            error=null(),
        )
    )
    conn.execute(
        update(Rejected)
        .where(*_rows(Rejected, job_id, begin, after))
        .values(row_id=null(), reason=_EMPTY)
    )
    conn.execute(update(Job).where(Job.job_id == job_id).values(purged_to=after))


def _rows(table: Any, job_id: str, begin: int, after: int | None) -> list[Any]:
    rows = [table.job_id == job_id, table.row_index >= begin]
    return rows if after is None else [*rows, table.row_index < after]
