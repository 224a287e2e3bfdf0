"""Files, batches and API keys of `specbatch serve` in SQL."""

from __future__ import annotations

from typing import Any

import orjson
from sqlalchemy import (
    Connection,
    Row,
    Select,
    bindparam,
    delete,
    func,
    insert,
    or_,
    select,
    text,
    update,
)

from specbatch.pipeline.ledger.sql.transactions import Now, upsert
from specbatch.schemas.errors import IdempotencyError, InUseError
from specbatch.schemas.mapper import named
from specbatch.schemas.serving import (
    ApiKey,
    BatchEnd,
    BatchPhase,
    BatchRow,
    BatchStatus,
    NewBatch,
    NoSuchFileError,
    Page,
    Purpose,
    Scope,
    StoredFile,
    TooManyOpenError,
)
from specbatch.schemas.serving_tables import ApiKey as KeyTable
from specbatch.schemas.serving_tables import Batch as BatchTable
from specbatch.schemas.serving_tables import ServedFile as FileTable

# Of a tenant's new batches each waits for the one before: else both would be the last one allowed.
_LOCK = text("SELECT pg_advisory_xact_lock(:of_batches, hashtext(:tenant))")
_OF_BATCHES = 1_900_129  # the first key of these locks
# Made once: every poll runs it.
_OF_TENANT = select(*BatchTable.__table__.c).where(
    BatchTable.batch_id == bindparam("batch_id"), BatchTable.tenant == bindparam("tenant")
)
_IS_OPEN = BatchTable.phase != BatchPhase.ENDED.value


# --- files ----------------------------------------------------------------------------------------
def add_file(conn: Connection, now: Now, file: StoredFile) -> StoredFile:
    values = {
        "file_id": file.file_id,
        "tenant": file.tenant,
        "purpose": file.purpose.value,
        "filename": file.filename,
        "size_bytes": file.size_bytes,
        "sha256": file.sha256,
        "service_id": file.service_id,
        "created_at": now,
    }
    added = insert(FileTable).values(**values).returning(*FileTable.__table__.c)
    return _file(conn.execute(added).one())


def file(conn: Connection, tenant: str, file_id: str) -> StoredFile | None:
    row = conn.execute(_file_of(tenant, file_id)).first()
    return None if row is None else _file(row)


def files(
    conn: Connection, tenant: str, page: Page, purpose: Purpose | None = None
) -> list[StoredFile]:
    query = select(*FileTable.__table__.c).where(FileTable.tenant == tenant)
    if purpose is not None:
        query = query.where(FileTable.purpose == purpose.value)
    return [_file(row) for row in conn.execute(paged(query, FileTable.file_id, page))]


def file_ids(conn: Connection, service_id: str) -> set[str]:
    return set(conn.scalars(select(FileTable.file_id).where(FileTable.service_id == service_id)))


def delete_file(conn: Connection, _now: Now, tenant: str, file_id: str) -> bool:
    # The lock is the one that `add_batch` takes: no batch begins to read it meanwhile.
    if conn.execute(_file_of(tenant, file_id).with_for_update()).first() is None:
        return False
    reads = select(BatchTable.batch_id).where(BatchTable.input_file_id == file_id, _IS_OPEN)
    if (batch_id := conn.scalar(reads.limit(1))) is not None:
        raise InUseError(
            f"file {file_id} is read by batch {batch_id}: wait for its end, or cancel it first"
        )
    conn.execute(delete(FileTable).where(FileTable.file_id == file_id))
    return True


def _file_of(tenant: str, file_id: str) -> Select[Any]:
    of_it = FileTable.file_id == file_id, FileTable.tenant == tenant
    return select(*FileTable.__table__.c).where(*of_it)


def _file(row: Row[Any]) -> StoredFile:
    return named(StoredFile, row, purpose=Purpose(row.purpose))


# --- batches --------------------------------------------------------------------------------------
def add_batch(conn: Connection, now: Now, batch: NewBatch, most_open: int) -> tuple[BatchRow, bool]:
    if conn.dialect.name == "postgresql":  # SQLite has one writer at a time
        conn.execute(_LOCK, {"of_batches": _OF_BATCHES, "tenant": batch.tenant})
    # The lock is the one that `delete_file` takes.
    input_file = conn.execute(_file_of(batch.tenant, batch.input_file_id).with_for_update()).first()
    if (known := _of_key(conn, batch)) is not None:
        return known, False
    if input_file is None:
        raise NoSuchFileError(f"there is no file {batch.input_file_id}: upload it first")
    if input_file.service_id != batch.service_id:
        raise NoSuchFileError(
            f"file {batch.input_file_id} is in the folder of another service: upload it here"
        )
    mine = select(func.count()).where(BatchTable.tenant == batch.tenant, _IS_OPEN)
    if (conn.scalar(mine) or 0) >= most_open:
        raise TooManyOpenError(
            f"{most_open} batches are open, which is the most at once: wait for one to end, or "
            "cancel one"
        )
    metadata = None if batch.metadata is None else orjson.dumps(dict(batch.metadata)).decode()
    values = {
        "batch_id": batch.batch_id,
        "tenant": batch.tenant,
        "endpoint": batch.endpoint,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "idempotency_key": batch.idempotency_key,
        "digest": batch.digest,
        "service_id": batch.service_id,
        "client_metadata": metadata,
        "phase": BatchPhase.NEW.value,
        "requests": 0,
        "completed": 0,
        "failed": 0,
        "created_at": now,
        "expires_at": now + batch.window_sec,
    }
    added = upsert(conn.dialect.name, BatchTable).values(**values).on_conflict_do_nothing()
    row = conn.execute(added.returning(*BatchTable.__table__.c)).first()
    if row is not None:
        return _batch(row), True
    known = _of_key(conn, batch)  # another request with this key was faster
    assert known is not None, "ids are new"
    return known, False


def _of_key(conn: Connection, batch: NewBatch) -> BatchRow | None:
    if batch.idempotency_key is None:
        return None
    row = conn.execute(
        select(*BatchTable.__table__.c).where(
            BatchTable.tenant == batch.tenant, BatchTable.idempotency_key == batch.idempotency_key
        )
    ).first()
    if row is not None and row.digest != batch.digest:
        raise IdempotencyError(
            f"this Idempotency-Key made batch {row.batch_id} of another request: use a new key, or "
            "send the same request"
        )
    return None if row is None else _batch(row)


def batch(conn: Connection, tenant: str, batch_id: str) -> BatchRow | None:
    row = conn.execute(_OF_TENANT, {"batch_id": batch_id, "tenant": tenant}).first()
    return None if row is None else _batch(row)


def batches(conn: Connection, tenant: str, page: Page) -> list[BatchRow]:
    query = select(*BatchTable.__table__.c).where(BatchTable.tenant == tenant)
    return [_batch(row) for row in conn.execute(paged(query, BatchTable.batch_id, page))]


def batch_of_file(conn: Connection, tenant: str, file_id: str) -> BatchRow | None:
    made = or_(BatchTable.output_file_id == file_id, BatchTable.error_file_id == file_id)
    query = select(*BatchTable.__table__.c).where(BatchTable.tenant == tenant, made)
    row = conn.execute(query).first()
    return None if row is None else _batch(row)


def open_batches(conn: Connection, service_id: str) -> list[BatchRow]:
    mine = BatchTable.service_id == service_id, _IS_OPEN
    query = select(*BatchTable.__table__.c).where(*mine).order_by(BatchTable.batch_id)
    return [_batch(row) for row in conn.execute(query)]


def begin_batch(conn: Connection, now: Now, batch_id: str, model: str, requests: int) -> BatchRow:
    values = {
        "phase": BatchPhase.RUNNING.value,
        "model": model,
        "requests": requests,
        "in_progress_at": now,
    }
    is_new = BatchTable.phase == BatchPhase.NEW.value
    return _changed(conn, batch_id, is_new, values)


def note_batch_job(conn: Connection, _now: Now, batch_id: str, job_id: str) -> BatchRow:
    return _changed(conn, batch_id, _IS_OPEN, {"job_id": job_id})


def note_batch_waits(conn: Connection, _now: Now, batch_id: str, why: str | None) -> BatchRow:
    return _changed(conn, batch_id, _IS_OPEN, {"waits_because": why})


def cancel_batch(conn: Connection, now: Now, tenant: str, batch_id: str) -> BatchRow | None:
    if batch(conn, tenant, batch_id) is None:
        return None
    asked = {"cancelling_at": func.coalesce(BatchTable.cancelling_at, now)}
    found = _changed(conn, batch_id, _IS_OPEN, asked)
    if found.phase is BatchPhase.NEW:
        return end_batch(conn, now, batch_id, BatchEnd(BatchStatus.CANCELLED), only_new=True)
    return found


def end_batch(
    conn: Connection, now: Now, batch_id: str, end: BatchEnd, only_new: bool = False
) -> BatchRow:
    values = {
        "phase": BatchPhase.ENDED.value,
        "status": end.status.value,
        "completed": end.completed,
        "failed": end.failed,
        "output_file_id": end.output and end.output.file_id,
        "error_file_id": end.errors_file and end.errors_file.file_id,
        "errors": orjson.dumps(list(end.errors)).decode() if end.errors else None,
        "finalizing_at": end.finalizing_at,
        "ended_at": now,
        "waits_because": None,
    }
    allowed = BatchTable.phase == BatchPhase.NEW.value if only_new else _IS_OPEN
    changed = update(BatchTable).where(BatchTable.batch_id == batch_id, allowed).values(**values)
    if conn.execute(changed.returning(BatchTable.batch_id)).first() is not None:
        for made in filter(None, (end.output, end.errors_file)):
            add_file(conn, now, made)
    return _by_id(conn, batch_id)


def _changed(conn: Connection, batch_id: str, allowed: Any, values: dict[str, Any]) -> BatchRow:
    conn.execute(
        update(BatchTable).where(BatchTable.batch_id == batch_id, allowed).values(**values)
    )
    return _by_id(conn, batch_id)


def _by_id(conn: Connection, batch_id: str) -> BatchRow:
    query = select(*BatchTable.__table__.c).where(BatchTable.batch_id == batch_id)
    return _batch(conn.execute(query).one())


def _batch(row: Row[Any]) -> BatchRow:
    return named(
        BatchRow,
        row,
        phase=BatchPhase(row.phase),
        status=None if row.status is None else BatchStatus(row.status),
        metadata=orjson.loads(row.client_metadata) if row.client_metadata else None,
        errors=tuple(orjson.loads(row.errors)) if row.errors else (),
    )


# --- keys -----------------------------------------------------------------------------------------
def add_api_key(conn: Connection, now: Now, key: ApiKey) -> ApiKey:
    values = {
        "key_id": key.key_id,
        "name": key.name,
        "tenant": key.tenant,
        "scopes": ",".join(sorted(key.scopes)),
        "digest": key.digest,
        "created_at": now,
        "expires_at": key.expires_at,
    }
    added = insert(KeyTable).values(**values).returning(*KeyTable.__table__.c)
    return _key(conn.execute(added).one())


def api_key(conn: Connection, now: Now, key_id: str) -> tuple[ApiKey, float] | None:
    query = select(*KeyTable.__table__.c, now.label("now")).where(KeyTable.key_id == key_id)
    row = conn.execute(query).first()
    return None if row is None else (_key(row), float(row.now))


def api_keys(conn: Connection, now: Now) -> tuple[list[ApiKey], float]:
    query = select(*KeyTable.__table__.c).order_by(KeyTable.created_at, KeyTable.key_id)
    return [_key(row) for row in conn.execute(query)], float(conn.execute(select(now)).scalar_one())


def revoke_api_key(conn: Connection, now: Now, key_id: str) -> ApiKey | None:
    statement = (
        update(KeyTable)
        .where(KeyTable.key_id == key_id)
        .values(revoked_at=func.coalesce(KeyTable.revoked_at, now))
        .returning(*KeyTable.__table__.c)
    )
    row = conn.execute(statement).first()
    return None if row is None else _key(row)


def _key(row: Any) -> ApiKey:
    return named(ApiKey, row, scopes=frozenset(map(Scope, row.scopes.split(","))))


def paged(query: Select[Any], by: Any, page: Page) -> Select[Any]:
    """The query's part of a list that is ordered by the column `by`."""
    if page.after is not None:
        query = query.where(by < page.after if page.descending else by > page.after)
    return query.order_by(by.desc() if page.descending else by).limit(page.limit)
