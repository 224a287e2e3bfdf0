"""The end of what is kept of texts, and where the whole of it lay: `PrivacyStore` in SQL.

A purge writes without looking: who may do it need not be able to read a text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import (
    Connection,
    Double,
    Select,
    case,
    literal,
    literal_column,
    null,
    or_,
    select,
    tuple_,
    update,
)

from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.privacy_contract import MOST_JOBS
from specbatch.pipeline.ledger.sql import chain, jobs
from specbatch.pipeline.ledger.sql.reading import PROMPTS
from specbatch.pipeline.ledger.sql.transactions import Now, Transactions
from specbatch.schemas import mapper
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.records import Artefact, JobRow, JobState, Prompts, Stage
from specbatch.schemas.tables import Completion, Group, Job, Rejected

_FINAL = [state.value for state in JobState if state.is_final]
_EMPTY: Any = literal_column("''")  # not encrypted: it holds nothing


class PrivacyInSql:
    """The part of `SqlStore` beside jobs and leases."""

    _db: Transactions

    def recorded_groups(self, job_id: str) -> list[tuple[int, Prompts, Artefact | None]]:
        return self._db.read(lambda conn: _recorded_groups(conn, job_id))

    def ended_jobs(
        self,
        age_sec: float,
        tenant: str | None = None,
        limit: int = MOST_JOBS,
        private_only: bool = False,
        after: JobRow | None = None,
    ) -> list[JobRow]:
        query = _ended(self._db.now() - age_sec).limit(limit)
        if tenant is not None:
            query = query.where(Job.tenant == tenant)
        if private_only:
            query = query.where(Job.privacy != PrivacyMode.FULL.value)
        if after is not None:
            last = (literal(after.finished_at, Double), literal(after.job_id))
            query = query.where(tuple_(Job.finished_at, Job.job_id) > tuple_(*last))
        return self._db.read(lambda conn: [mapper.job_row(row) for row in conn.execute(query)])

    def purge(
        self, job_id: str, why: str, batch_rows: int = 1000, unfinished: bool = False
    ) -> Iterator[int]:
        db = self._db
        found, at, rows = db.write(lambda conn: _begin(conn, db.now(), job_id, why))
        if at is not None:
            yield at
        while at is not None:
            after = at + batch_rows if at + batch_rows < rows else None
            begin, upto = at, rows if unfinished and after is None else after
            db.write(lambda conn: _empty_rows(conn, found, begin, upto))  # noqa: B023 - called at once
            yield rows if after is None else after
            at = after


def _recorded_groups(conn: Connection, job_id: str) -> list[tuple[int, Prompts, Artefact | None]]:
    is_done = Group.stage == Stage.DONE.value
    rows = conn.execute(
        select(
            Group.group_index,
            *PROMPTS,
            case((is_done, Group.results), else_=null()).label("results"),
        ).where(Group.job_id == job_id, or_(is_done, Group.rows_kept > 0))
    )
    found = [(row.group_index, mapper.prompts(row), mapper.artefact(row.results)) for row in rows]
    return sorted(found, key=lambda group: rules.row_order(group[1]))


def _ended(before: Now) -> Select[Any]:
    return (
        select(*Job.__table__.c)
        .where(Job.state.in_(_FINAL), Job.finished_at <= before)
        .where(or_(Job.purged_at.is_(None), Job.purged_to.is_not(None)))
        .order_by(Job.finished_at, Job.job_id)
    )


def _begin(conn: Connection, now: Now, job_id: str, why: str) -> tuple[str, int | None, int]:
    """(whole id, row to go on from or None, rows), after the entry in the log."""
    row = jobs.lock(conn, jobs.find(conn, job_id).job_id)
    rules.check_purge(mapper.job_row(row))
    if row.purged_at is not None:
        return row.job_id, row.purged_to, row.next_row
    said = {"rows": None, "why": why, "output": False}
    head = chain.link(conn, now, row, EntryKind.PURGED, said)
    emptied = {"sealed_spec": null(), "last_error": null()}
    conn.execute(
        update(Job)
        .where(Job.job_id == row.job_id)
        .values(purged_at=now, purged_to=0, **emptied, **head)
    )
    conn.execute(update(Group).where(Group.job_id == row.job_id).values(last_error=null()))
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
