"""The store in SQL: each method is one transaction over the statements of a neighbouring file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from specbatch.pipeline.ledger import groups, jobs, progress, reading, rules
from specbatch.pipeline.ledger import leases as leasing
from specbatch.pipeline.ledger.transactions import RETRY_SEC, Now, Transactions
from specbatch.schemas.records import (
    Artefact,
    Bell,
    CompletionRecord,
    GroupWork,
    JobProgress,
    JobRow,
    JobState,
    JobWork,
    Lease,
    NewGroup,
    NewJob,
    RejectedRow,
    SourcePosition,
    Stage,
    StageTiming,
)

P = ParamSpec("P")
T = TypeVar("T")


class SqlStore:
    """`Store` on SQLite or PostgreSQL. Threads may share it; processes make their own.

    The tables must be there: `migrate.open_store` sees to that. `clock` replaces the store's time
    (the server's on PostgreSQL) in tests. Every method raises `StoreError` when the database
    refuses, or is out of reach for longer than `retry_sec`.
    """

    def __init__(
        self,
        url: str,
        max_attempts: int = 3,
        *,
        clock: Callable[[], float] | None = None,
        retry_sec: float = RETRY_SEC,
    ) -> None:
        self._db = Transactions(url, clock, retry_sec)
        self._max_attempts = max_attempts

    def __repr__(self) -> str:
        return f"SqlStore({self._db.shown_url})"

    # --- jobs -------------------------------------------------------------------------------
    def create_job(self, job: NewJob) -> tuple[JobRow, bool]:
        return self._write(jobs.create, job)

    def get_job(self, job_id: str) -> JobRow:
        return self._db.read(lambda conn: jobs.row(conn, job_id))

    def list_jobs(self, limit: int = 50, state: JobState | None = None) -> list[JobRow]:
        return self._db.read(lambda conn: jobs.newest(conn, limit, state))

    def progress(self, job_id: str) -> JobProgress:
        return self._db.read(lambda conn: progress.progress(conn, job_id))

    def request_cancel(self, job_id: str) -> JobRow:
        return self._write(jobs.request_cancel, job_id)

    def retry_job(self, job_id: str) -> int:
        return self._write(jobs.retry, job_id)

    def fail_job(self, lease: Lease, error: str) -> None:
        self._write(jobs.fail, lease, error)

    # --- leases -----------------------------------------------------------------------------
    def claim_job(self, job_id: str, stage: Stage, owner: str, lease_sec: float) -> JobWork | None:
        return self._write(leasing.claim_job, job_id, stage, owner, lease_sec, self._max_attempts)

    def claim_group(
        self, job_id: str, index: int, stage: Stage, owner: str, lease_sec: float
    ) -> GroupWork | None:
        return self._write(
            leasing.claim_group, job_id, index, stage, owner, lease_sec, self._max_attempts
        )

    def heartbeat(self, leases: Sequence[Lease], lease_sec: float) -> tuple[set[Lease], set[str]]:
        return self._write(leasing.heartbeat, leases, lease_sec) if leases else (set(), set())

    def release(self, lease: Lease, error: str, forgiven: bool = False) -> None:
        self._write(leasing.release, lease, error, forgiven, self._max_attempts)

    def cancel_group(self, lease: Lease) -> None:
        self._write(groups.cancel, lease)

    def due(self, limit: int = 1000) -> list[Bell]:
        now = self._db.now()
        return self._db.read(lambda conn: leasing.due(conn, now, limit))

    # --- ingest -----------------------------------------------------------------------------
    def add_groups(
        self,
        lease: Lease,
        groups: Sequence[NewGroup],
        rejected: Sequence[RejectedRow],
        next_row: int,
        cursor: SourcePosition,
    ) -> None:
        self._write(jobs.add_groups, lease, groups, rejected, next_row, cursor)

    def finish_ingest(self, lease: Lease, rows_total: int, models: Mapping[str, Any]) -> None:
        self._write(jobs.finish_ingest, lease, rows_total, models)

    # --- groups -----------------------------------------------------------------------------
    def advance(
        self, lease: Lease, to: Stage, artefact: Artefact | None, timing: StageTiming
    ) -> None:
        rules.check_step(lease.stage, to, artefact is not None)
        self._write(groups.advance, lease, to, artefact, timing)

    def commit_group(
        self,
        lease: Lease,
        completions: Sequence[CompletionRecord],
        timing: StageTiming,
        report: Mapping[str, float],
    ) -> None:
        self._write(groups.commit, lease, completions, timing, report)

    # --- publish ----------------------------------------------------------------------------
    def completions(self, job_id: str, batch: int = 1000) -> Iterator[CompletionRecord]:
        return reading.completions(self._db, job_id, batch)

    def rejected(self, job_id: str) -> Iterator[RejectedRow]:
        return reading.rejected(self._db, job_id)

    def failed_groups(self, job_id: str) -> list[tuple[int, str, Artefact, str]]:
        return self._db.read(lambda conn: reading.failed_groups(conn, job_id))

    def finish_job(self, lease: Lease, state: JobState, error: str | None = None) -> None:
        rules.check_final(state)
        self._write(jobs.finish, lease, state, error)

    def close(self) -> None:
        """Close the pool's connections."""
        self._db.close()

    def _write(
        self, work: Callable[Concatenate[Connection, Now, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return self._db.write(lambda conn: work(conn, self._db.now(), *args, **kwargs))
