"""Results of a job in order, a page at a time: no long transaction, little memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, case, null, or_, select, type_coerce

from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.sql.transactions import Transactions
from specbatch.schemas import completion_rows, mapper
from specbatch.schemas.records import (
    Artefact,
    CompletionRecord,
    JobRow,
    Prompts,
    RejectedRow,
    Stage,
)
from specbatch.schemas.tables import Completion, Group, Job, Rejected

_UNFINISHED = (Stage.FAILED.value, Stage.CANCELLED.value)
PROMPTS = (Group.prompts, Group.row_start, Group.rows)
# What `completion_record` needs beside a completion's own columns.
MODELS_OF_JOB: tuple[Any, ...] = (
    Job.verifier.label("job_verifier"),
    Job.proposer.label("job_proposer"),
)
BY_ROW: tuple[Any, ...] = (Completion.row_index, Completion.sample_index)


def completions(
    database: Transactions,
    job_id: str,
    batch: int = 1000,
    details: bool = True,
    first_row: int = 0,
    before_row: int | None = None,
) -> Iterator[CompletionRecord]:
    """Completions by (row, sample)."""
    query = (
        select(
            *(Completion.__table__.c if details else _published()),
            *MODELS_OF_JOB,
        )
        .join(Job, Job.job_id == Completion.job_id)
        .where(*_of_rows(Completion, job_id, first_row, before_row))
    )
    for rows in database.pages(query, BY_ROW, batch):
        yield from map(completion_rows.completion_record, rows)


def _published() -> list[Any]:
    """The columns of a completion; NULL for `DETAILS`, which are most of a row's bytes."""
    asked_for = Completion.top_token_ids.is_not(None)
    columns: dict[str, Any] = {column.name: column for column in Completion.__table__.c}
    for name in mapper.DETAILS:
        columns[name] = type_coerce(null(), columns[name].type).label(name)
    columns["logprobs"] = case((asked_for, columns["logprobs"]), else_=null()).label("logprobs")
    return list(columns.values())


def rejected(
    database: Transactions,
    job_id: str,
    batch: int = 1000,
    first_row: int = 0,
    before_row: int | None = None,
) -> Iterator[RejectedRow]:
    """Quarantined rows, by row."""
    query = select(*Rejected.__table__.c).where(*_of_rows(Rejected, job_id, first_row, before_row))
    for rows in database.pages(query, (Rejected.row_index,), batch):
        yield from map(mapper.rejected_row, rows)


def _of_rows(
    table: type[Completion] | type[Rejected], job_id: str, first: int, before: int | None
) -> list[Any]:
    which: list[Any] = [table.job_id == job_id]
    if first:
        which.append(table.row_index >= first)
    if before is not None:
        which.append(table.row_index < before)
    return which


def failed_groups(conn: Connection, job_id: str) -> list[tuple[int, str, Prompts, str]]:
    """(index, failed or cancelled, prompts, last error), by index."""
    rows = conn.execute(
        select(Group.group_index, Group.stage, *PROMPTS, Group.last_error)
        .where(Group.job_id == job_id, Group.stage.in_(_UNFINISHED))
        .order_by(Group.group_index)
    )
    return [(row.group_index, row.stage, mapper.prompts(row), row.last_error or "") for row in rows]


def recorded_groups(conn: Connection, job_id: str) -> list[tuple[int, Prompts, Artefact | None]]:
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


def kept_rows(conn: Connection, job_id: str, index: int | None = None) -> set[int]:
    """Rows that were finished when their groups were stopped; of one group, or of all."""
    kept = [Group.job_id == job_id, Group.rows_kept > 0]
    if index is not None:
        kept.append(Group.group_index == index)
    rows = conn.scalars(
        select(Completion.row_index)
        .join(
            Group,
            (Group.job_id == Completion.job_id) & (Group.group_index == Completion.group_index),
        )
        .where(Completion.job_id == job_id, *kept)
        .distinct()
    )
    return set(rows)


def revision(conn: Connection) -> str | None:
    """The database's revision; None when it was never migrated."""
    return MigrationContext.configure(conn).get_current_revision()


def job_of_key(conn: Connection, key: str) -> JobRow | None:
    """The job with this idempotency key; None when there is none."""
    found = conn.execute(select(*Job.__table__.c).where(Job.idempotency_key == key)).first()
    return None if found is None else mapper.job_row(found)


def prompts_of(conn: Connection, job_id: str, index: int) -> Prompts | None:
    """The prompts of one group; None when there is none."""
    found = conn.execute(
        select(*PROMPTS).where(Group.job_id == job_id, Group.group_index == index)
    ).first()
    return None if found is None else mapper.prompts(found)
