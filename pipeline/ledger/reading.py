"""Results of a job in order, a page at a time: no long transaction, little memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from sqlalchemy import Connection, Row, Select, select, tuple_

from specbatch.pipeline.ledger.transactions import Transactions
from specbatch.schemas import mapper
from specbatch.schemas.records import Artefact, CompletionRecord, RejectedRow, Stage
from specbatch.schemas.tables import Completion, Group, Rejected

_UNFINISHED = (Stage.FAILED.value, Stage.CANCELLED.value)


def completions(database: Transactions, job_id: str, batch: int) -> Iterator[CompletionRecord]:
    """All completions by (row, sample)."""
    key = tuple_(Completion.row_index, Completion.sample_index)
    query = (
        select(*Completion.__table__.c)
        .where(Completion.job_id == job_id)
        .order_by(Completion.row_index, Completion.sample_index)
        .limit(batch)
    )
    after = (-1, -1)
    while True:
        rows = database.read(partial(_fetch, query.where(key > after)))
        yield from map(mapper.completion_record, rows)
        if len(rows) < batch:
            return
        after = (rows[-1].row_index, rows[-1].sample_index)


def rejected(database: Transactions, job_id: str, batch: int = 1000) -> Iterator[RejectedRow]:
    """Quarantined rows, by row."""
    query = (
        select(*Rejected.__table__.c)
        .where(Rejected.job_id == job_id)
        .order_by(Rejected.row_index)
        .limit(batch)
    )
    after = -1
    while True:
        rows = database.read(partial(_fetch, query.where(Rejected.row_index > after)))
        yield from map(mapper.rejected_row, rows)
        if len(rows) < batch:
            return
        after = rows[-1].row_index


def failed_groups(conn: Connection, job_id: str) -> list[tuple[int, str, Artefact, str]]:
    """(index, failed or cancelled, prompts, last error), by index."""
    rows = conn.execute(
        select(Group.group_index, Group.stage, Group.prompts, Group.last_error)
        .where(Group.job_id == job_id, Group.stage.in_(_UNFINISHED))
        .order_by(Group.group_index)
    )
    return [
        (row.group_index, row.stage, Artefact(**row.prompts), row.last_error or "") for row in rows
    ]


def _fetch(query: Select[Any], conn: Connection) -> Sequence[Row[Any]]:
    return conn.execute(query).all()
