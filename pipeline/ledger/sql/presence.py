"""Worker processes in SQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, delete, select
from sqlalchemy.dialects import postgresql, sqlite

from specbatch.pipeline.ledger.sql.transactions import Now, Transactions
from specbatch.schemas import presence
from specbatch.schemas.presence import ProcessNow
from specbatch.schemas.time_tables import WorkerProcess


class PresenceInSql:
    """Each method is one transaction."""

    _db: Transactions

    def tell_process(self, process: presence.WorkerProcess, trouble: str | None) -> None:
        self._db.write(lambda conn: _tell(conn, self._db.now(), process, trouble))

    def forget_process(self, process_id: str) -> None:
        gone = delete(WorkerProcess).where(WorkerProcess.process_id == process_id)
        self._db.write(lambda conn: conn.execute(gone))

    def forget_silent_processes(self, patience_sec: float) -> int:
        def forget(conn: Connection) -> int:
            silent = WorkerProcess.heard_at <= self._db.now() - patience_sec
            return conn.execute(delete(WorkerProcess).where(silent)).rowcount

        return self._db.write(forget)


def processes(conn: Connection, at: float) -> Sequence[ProcessNow]:
    """All of them, by owner. `at`: what time it is."""
    order = (WorkerProcess.owner, WorkerProcess.process_id)
    rows = conn.execute(select(*WorkerProcess.__table__.c).order_by(*order))
    return [_now(row, at) for row in rows]


def _now(row: Any, at: float) -> ProcessNow:
    process = presence.WorkerProcess(
        row.process_id, row.owner, tuple(row.kinds.split(",")), row.verifier, row.proposer
    )
    return ProcessNow(process, at - row.started_at, at - row.heard_at, row.trouble)


def _tell(conn: Connection, now: Now, process: presence.WorkerProcess, trouble: str | None) -> None:
    insert = postgresql.insert if conn.dialect.name == "postgresql" else sqlite.insert
    told = {"heard_at": now, "trouble": trouble}
    conn.execute(
        insert(WorkerProcess)
        .values(
            process_id=process.process_id,
            owner=process.owner,
            kinds=",".join(process.kinds),
            verifier=process.verifier,
            proposer=process.proposer,
            started_at=now,
            **told,
        )
        .on_conflict_do_update(index_elements=[WorkerProcess.process_id], set_=told)
    )
