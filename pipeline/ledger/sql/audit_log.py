"""The audit log of a job: entries that each carry the hash of the one before.

An entry is added inside the transaction that it describes, while that holds the job's row. So a
job's entries are numbered one after another, and what was not committed is not logged. The job's
row keeps the number and the hash of the last entry: else nobody could tell that the last are
missing.

What an audit reads, it does not trust: rows may have been changed by hand. Where a page cannot be
read, its rows are read one by one, and the audit says which of them cannot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Row,
    Select,
    Text,
    false,
    func,
    insert,
    select,
    tuple_,
    type_coerce,
)

from specbatch.pipeline.audit import entries
from specbatch.pipeline.audit.accounts import OF_GROUP, OF_JOB, OF_USAGE, AccountRows
from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.sql import time
from specbatch.pipeline.ledger.sql.reading import BY_ROW, MODELS_OF_JOB, PROMPTS
from specbatch.pipeline.ledger.sql.transactions import ACTOR, Now, Transactions, is_transient
from specbatch.schemas import completion_rows, mapper, time_mapper
from specbatch.schemas.audit import (
    FIRST,
    AuditRecord,
    Correctness,
    EntryKind,
    Finding,
    FindingKind,
    Head,
    KeptCompletion,
    KeptGroup,
    LogEntry,
)
from specbatch.schemas.audit_tables import Audit, AuditFinding, AuditLog
from specbatch.schemas.encryption import is_encrypted_text, no_key
from specbatch.schemas.errors import JobNotFoundError, StoreError, UnknownKeyError
from specbatch.schemas.records import CompletionRecord
from specbatch.schemas.tables import (
    Completion,
    Decision,
    Group,
    Job,
    StageUsage,
    TimeSlice,
    WorkerSession,
)
from specbatch.schemas.text_columns import SHOWN_WITHOUT_KEY

SPOILT = (ValueError, TypeError, KeyError, OverflowError)  # what reading a spoilt row raises


# --- writing --------------------------------------------------------------------------------


def link(
    conn: Connection,
    now: Now,
    job: Any,
    kind: EntryKind,
    payload: Mapping[str, Any],
    actor: str | None = None,
) -> dict[str, Any]:
    """Add an entry to the log of a locked job (`jobs.lock`); returns what its row is updated with.

    One statement, so an entry costs no more where the row is updated anyway. `actor` did it; None:
    whom this store works for. `payload` is plain JSON and stays for ever: it holds digests of
    prompts and outputs, never their text.
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
    """The first entry of a new job with these values; `write_first` stores it."""
    return entries.submitted(values, at, actor_of(conn))


def write_first(conn: Connection, entry: LogEntry) -> None:
    """Store the entry of `begin`, once the job is there."""
    _insert(conn, [entry])


def new_head(entry: LogEntry) -> dict[str, Any]:
    """The columns of the job's row that hold its log's end."""
    return {"log_number": entry.number, "log_head": entry.hash}


def clock(conn: Connection, now: Now, job: Any = None) -> float:
    """The store's time as a number: with a locked row of PostgreSQL, no statement is needed."""
    at: Any = now.value if isinstance(now, BindParameter) else getattr(job, "locked_at", None)
    return float(conn.scalars(select(now)).one() if at is None else at)


def actor_of(conn: Connection) -> str:
    """The actor that this connection's store works for."""
    return str(conn.get_execution_options().get(ACTOR, ""))


def _insert(conn: Connection, added: list[LogEntry]) -> None:
    conn.execute(insert(AuditLog), [entries.values(entry) for entry in added])


# --- the log --------------------------------------------------------------------------------


def log(database: Transactions, job_id: str, after: int = 0, batch: int = 64) -> Iterator[LogEntry]:
    """The entries after number `after`."""
    query = select(*AuditLog.__table__.c).where(AuditLog.job_id == job_id, AuditLog.number > after)
    for rows in database.pages(query, (AuditLog.number,), batch):
        for row in rows:
            yield LogEntry(**row._mapping)


def head(conn: Connection, job_id: str) -> Head:
    """The end of the log by the job's row."""
    row = conn.execute(select(Job.log_number, Job.log_head).where(Job.job_id == job_id)).first()
    return Head() if row is None else Head(row.log_number, row.log_head or FIRST)


def logged_job(conn: Connection, job_id: str) -> str:
    """The id of the one job with this id or prefix, whether its row exists or not."""
    ids = set[str]()
    for column in (Job.job_id, AuditLog.job_id):
        match: ColumnElement[bool] = column == job_id
        if len(job_id) >= rules.MIN_PREFIX:
            match |= column.startswith(job_id, autoescape=True)
        ids |= set(conn.scalars(select(column).where(match).distinct().limit(rules.MOST_NAMED + 1)))
    found = sorted(one for one in ids if one.startswith(job_id))  # SQLite's LIKE folds case
    if job_id in found:
        return job_id
    if problem := rules.find_by_prefix(job_id, found):
        raise JobNotFoundError(problem)
    return found[0]


# --- what the log pins ----------------------------------------------------------------------


def job_facts(database: Transactions, job_id: str) -> Mapping[str, Any] | None:
    """The columns of the job's row that can be read."""
    of_job = Job.job_id == job_id
    whole = _if_readable(database, select(*Job.__table__.c).where(of_job))
    if whole is not None:
        if not whole:
            return None
        _check_key(database, of_job, whole[0]._mapping)
        return dict(whole[0]._mapping)
    facts: dict[str, Any] = {}
    for column in Job.__table__.c:
        if found := _if_readable(database, select(column).where(of_job)):
            facts[column.name] = found[0][0]
    _check_key(database, of_job, facts)
    return facts


def _check_key(
    database: Transactions, of_job: ColumnElement[bool], facts: Mapping[Any, Any]
) -> None:
    """Raise `UsageError` where a text is encrypted and its key is missing.

    The words shown in its place were never written, and are no change either.
    """
    for column in (Job.stop_reason, Job.error):
        if facts.get(column.name) == SHOWN_WITHOUT_KEY:
            query = select(type_coerce(column, Text)).where(of_job)
            if is_encrypted_text(database.rows(query)[0][0]):
                raise no_key(f"jobs.{column.name}")


def kept(database: Transactions, job_id: str, batch: int = 500) -> Iterator[KeptCompletion]:
    """All completions by (row, sample)."""
    key = tuple_(*BY_ROW)
    places = select(*BY_ROW, Completion.group_index, Completion.digest, Completion.month)
    whole = _whole().where(Completion.job_id == job_id)
    for rows in database.pages(places.where(Completion.job_id == job_id), BY_ROW, batch):
        at_each = [(row.row_index, row.sample_index) for row in rows]
        page = _if_readable(database, whole.where(key >= at_each[0], key <= at_each[-1]))
        keyless: set[tuple[int, int]] = set()
        if page is None:
            page, keyless = _one_by_one(database, {at: whole.where(key == at) for at in at_each})
        records = {(r.row_index, r.sample_index): readable_record(r) for r in page}
        for at, row in zip(at_each, rows, strict=True):
            record, lacks_key = records.get(at), at in keyless
            yield KeptCompletion(*at, row.group_index, row.digest, record, row.month, lacks_key)


def _one_by_one(
    database: Transactions, queries: Mapping[tuple[int, int], Select[Any]]
) -> tuple[list[Row[Any]], set[tuple[int, int]]]:
    """The readable rows of a page, and the places of rows whose key is missing.

    Raises `UnknownKeyError` when all keys are missing: one might be forged.
    """
    found: list[Row[Any]] = []
    keyless = set[tuple[int, int]]()
    for at, query in queries.items():
        try:
            found += _if_readable(database, query, UnknownKeyError) or ()
        except UnknownKeyError:
            keyless.add(at)
            if len(keyless) == len(queries):
                raise
    return found, keyless


def _whole() -> Select[Any]:
    """Completions with columns of their job's row, also where there is no such row."""
    columns: list[Any] = [*Completion.__table__.c, *MODELS_OF_JOB]
    return select(*columns).outerjoin(Job, Job.job_id == Completion.job_id)


def readable_record(row: Row[Any]) -> CompletionRecord | None:
    """The record of a row; None if somebody has spoilt a column."""
    try:
        return completion_rows.completion_record(row)
    except SPOILT:
        return None


def _if_readable(
    database: Transactions, query: Select[Any], unless: type[StoreError] | None = None
) -> Sequence[Row[Any]] | None:
    """The query's rows; None where values cannot be read."""
    try:
        return database.rows(query)
    except StoreError as error:
        if is_transient(error.__cause__ or error) or (unless and isinstance(error, unless)):
            raise
        return None
    except SPOILT:
        return None


def kept_one(database: Transactions, job_id: str, row: int, sample: int) -> KeptCompletion | None:
    """One completion."""
    query = _whole().where(
        Completion.job_id == job_id, Completion.row_index == row, Completion.sample_index == sample
    )
    found = _if_readable(database, query)
    if not found:
        return None
    one = found[0]
    return KeptCompletion(row, sample, one.group_index, one.digest, readable_record(one), one.month)


def groups(database: Transactions, job_id: str, batch: int = 1000) -> Iterator[KeptGroup]:
    """All groups by index."""
    columns = (Group.group_index, *PROMPTS, Group.stage, Group.last_error)
    query = select(*columns).where(Group.job_id == job_id)
    for rows in database.pages(query, (Group.group_index,), batch):
        for row in rows:
            index, error = row.group_index, row.last_error
            lacks_key = error == SHOWN_WITHOUT_KEY
            yield KeptGroup(index, mapper.prompts(row), row.stage, error, lacks_key)


# --- audits ---------------------------------------------------------------------------------

_OF_AUDIT = ("job_id", "at", "actor", "sampled", "differing", "tokens", "intact", "note")
_COLUMNS = {  # of a finding's fields
    **{name: name for name in ("kind", "what", "number", "position", "margin")},
    **{"row": "row_index", "sample": "sample_index"},
    **{"written": "written_token", "decided": "decided_token"},
}


def keep_audit(conn: Connection, now: Now, audit: AuditRecord) -> None:
    audit = replace(audit, at=clock(conn, now), actor=actor_of(conn))
    values = {name: getattr(audit, name) for name in _OF_AUDIT}
    audit_id = conn.scalar(insert(Audit).values(**values).returning(Audit.id))
    found = [
        {
            "audit_id": audit_id,
            "place": place,
            **{column: getattr(finding, name) for name, column in _COLUMNS.items()},
        }
        for place, finding in enumerate(audit.findings)
    ]
    if found:
        conn.execute(insert(AuditFinding), found)


def audits(conn: Connection, job_id: str) -> list[AuditRecord]:
    rows = conn.execute(
        select(*Audit.__table__.c).where(Audit.job_id == job_id).order_by(Audit.at, Audit.id)
    ).all()
    found: dict[int, list[Finding]] = {row.id: [] for row in rows}
    query = (
        select(*AuditFinding.__table__.c)
        .join(Audit, Audit.id == AuditFinding.audit_id)
        .where(Audit.job_id == job_id)
        .order_by(AuditFinding.audit_id, AuditFinding.place)
    )
    for row in conn.execute(query):
        values = {name: getattr(row, column) for name, column in _COLUMNS.items()}
        found[row.audit_id].append(Finding(**values | {"kind": FindingKind(row.kind)}))
    return [
        AuditRecord(
            **{name: getattr(row, name) for name in _OF_AUDIT}, findings=tuple(found[row.id])
        )
        for row in rows
    ]


def correctness(conn: Connection, since: float = 0.0) -> Correctness:
    total = select(
        func.coalesce(func.sum(Audit.sampled), 0), func.coalesce(func.sum(Audit.differing), 0)
    )
    audited, differing = conn.execute(total.where(Audit.at >= since)).one()
    return Correctness(int(audited), int(differing))


# --- accounts -------------------------------------------------------------------------------


def accounts(conn: Connection, job_id: str) -> AccountRows:
    """What `audit/accounts.py` pins and compares."""
    job = conn.execute(
        select(*(getattr(Job, name) for name in OF_JOB)).where(Job.job_id == job_id)
    ).one()
    groups = conn.execute(
        select(Group.group_index, *(getattr(Group, name) for name in OF_GROUP))
        .where(Group.job_id == job_id)
        .order_by(Group.group_index)
    )
    # Before their slices: those of a session that has ended are final.
    sessions = time.sessions(conn, job_id, None)
    device = [getattr(WorkerSession, name) for name in time_mapper.DEVICE]
    slices = conn.execute(
        select(*TimeSlice.__table__.c, *device, false().label("in_flight"))
        .join(WorkerSession, WorkerSession.session_id == TimeSlice.session_id)
        .where(TimeSlice.job_id == job_id)
        .order_by(TimeSlice.group_index, TimeSlice.generation, TimeSlice.session_id)
    )
    decisions = conn.execute(
        select(*Decision.__table__.c).where(Decision.job_id == job_id).order_by(Decision.id)
    )
    used = conn.execute(
        select(*(getattr(StageUsage, name) for name in OF_USAGE))
        .where(StageUsage.job_id == job_id, StageUsage.kept)
        .order_by(StageUsage.group_index, StageUsage.generation)
    )
    return AccountRows(
        job=dict(job._mapping),
        groups=[tuple(row) for row in groups],
        slices=[time_mapper.time_slice(row) for row in slices],
        sessions=sessions,
        decisions=[(row.id, mapper.decision(row)) for row in decisions],
        usage=[tuple(row) for row in used],
    )
