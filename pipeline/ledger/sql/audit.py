"""What audits need of the SQL store: `AuditStore` over the statements of `audit_reading.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection

from specbatch.pipeline.audit.accounts import AccountRows
from specbatch.pipeline.ledger.sql import account_rows, audit_reading, chain, jobs
from specbatch.pipeline.ledger.sql.transactions import Transactions
from specbatch.schemas.audit import (
    AuditRecord,
    Correctness,
    EntryKind,
    Head,
    KeptCompletion,
    LogEntry,
)
from specbatch.schemas.records import Prompts


class AuditInSql:
    """The part of `SqlStore` beside jobs and leases."""

    _db: Transactions

    def note_action(self, job_id: str, kind: EntryKind, payload: Mapping[str, Any]) -> Head:
        def note(conn: Connection) -> Head:
            job = jobs.lock(conn, jobs.find(conn, job_id).job_id)
            return chain.append(conn, self._db.now(), job.job_id, kind, None, payload)

        return self._db.write(note)

    def log(self, job_id: str, after: int = 0, batch: int = 64) -> Iterator[LogEntry]:
        return audit_reading.log(self._db, job_id, after, batch)

    def log_head(self, job_id: str) -> Head:
        return self._db.read(lambda conn: audit_reading.head(conn, job_id))

    def logged_job(self, job_id: str) -> str:
        return self._db.read(lambda conn: audit_reading.logged_job(conn, job_id))

    def job_facts(self, job_id: str) -> Mapping[str, Any] | None:
        return audit_reading.job_facts(self._db, job_id)

    def kept(self, job_id: str, batch: int = 500) -> Iterator[KeptCompletion]:
        return audit_reading.kept(self._db, job_id, batch)

    def kept_one(self, job_id: str, row: int, sample: int) -> KeptCompletion | None:
        return audit_reading.kept_one(self._db, job_id, row, sample)

    def groups(self, job_id: str) -> Iterator[tuple[int, Prompts]]:
        return audit_reading.groups(self._db, job_id)

    def accounts(self, job_id: str) -> AccountRows:
        return self._db.read(lambda conn: account_rows.read(conn, job_id))

    def keep_audit(self, audit: AuditRecord) -> None:
        def keep(conn: Connection) -> None:
            at, actor = chain.clock(conn, self._db.now()), chain.actor_of(conn)
            audit_reading.keep_audit(conn, replace(audit, at=at, actor=actor))

        self._db.write(keep)

    def audits(self, job_id: str) -> list[AuditRecord]:
        return self._db.read(lambda conn: audit_reading.audits(conn, job_id))

    def correctness(self, since: float = 0.0) -> Correctness:
        return self._db.read(lambda conn: audit_reading.correctness(conn, since))
