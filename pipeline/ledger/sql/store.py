"""The store in SQL: each method is one transaction over the statements of a neighbouring file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.actor import whoami
from specbatch.pipeline.ledger.sql import (
    choosing,
    cutting,
    groups,
    heartbeats,
    jobs,
    learning,
    moving,
    progress,
    reading,
    serving,
    stopping,
    sweeping,
)
from specbatch.pipeline.ledger.sql import leases as leasing
from specbatch.pipeline.ledger.sql.audit import AuditInSql
from specbatch.pipeline.ledger.sql.presence import PresenceInSql
from specbatch.pipeline.ledger.sql.purging import PrivacyInSql
from specbatch.pipeline.ledger.sql.reporting import ReportingInSql
from specbatch.pipeline.ledger.sql.schedules import SchedulesInSql
from specbatch.pipeline.ledger.sql.store_figures import FiguresInSql
from specbatch.pipeline.ledger.sql.time import SqlTime
from specbatch.pipeline.ledger.sql.transactions import RETRY_SEC, Transactions
from specbatch.schemas.audit import EntryKind, PublishedManifest
from specbatch.schemas.encryption import Cipher
from specbatch.schemas.fingerprint import Models
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.masking import masked
from specbatch.schemas.numeric_class import Change, Serves
from specbatch.schemas.records import (
    Artefact,
    Beat,
    CompletionRecord,
    DueWork,
    GroupWork,
    JobRow,
    JobState,
    JobWork,
    Lease,
    NewGroup,
    NewJob,
    Prompts,
    RejectedRow,
    Released,
    SourcePosition,
    Stage,
    StageTiming,
)
from specbatch.schemas.speculation import AcceptanceCount, Decision, PastOutput
from specbatch.schemas.timekeeping import Spent

CLASS_CHANGES = 5  # of a job, while one claim is made


class SqlStore(
    AuditInSql,
    FiguresInSql,
    PresenceInSql,
    PrivacyInSql,
    ReportingInSql,
    SchedulesInSql,
    SqlTime,
):
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
        weights: Mapping[str, float] | None = None,
        cipher: Cipher | None = None,
        actor: str | None = None,
    ) -> None:
        """`weights` are the tenants' shares beside each other; 1 where none is given.

        `cipher`: encrypts texts; None: texts stay plain, and encrypted ones cannot be read.
        `actor` is whom the audit log names for what is done here; None: the user and the machine.
        """
        self._weights = dict(weights or {})
        self._db = Transactions(url, clock, retry_sec, actor or whoami(), cipher)
        self._max_attempts = max_attempts

    def __repr__(self) -> str:
        return f"SqlStore({self._db.shown_url})"

    # --- jobs -------------------------------------------------------------------------------
    def create_job(self, job: NewJob) -> tuple[JobRow, bool]:
        self._write(jobs.make_month)
        return self._write(jobs.create, job)

    def get_job(self, job_id: str) -> JobRow:
        return self._db.read(lambda conn: jobs.row(conn, job_id))

    def job_of_key(self, key: str) -> JobRow | None:
        return self._db.read(lambda conn: reading.job_of_key(conn, key))

    def list_jobs(self, limit: int = 50, state: JobState | None = None) -> list[JobRow]:
        return self._db.read(lambda conn: jobs.newest(conn, limit, state))

    def progress(self, job_id: str) -> JobProgress:
        return self._db.read(lambda conn: progress.progress(conn, job_id))

    def request_cancel(self, job_id: str, reason: str | None = None) -> JobRow:
        return self._write(jobs.request_cancel, job_id, reason)

    def stop_overdue(self) -> set[str]:
        now = self._db.now()
        return self._stop(self._db.read(lambda conn: stopping.over_limits(conn, now)))

    def look(self, spent_usd: Mapping[Lease, float]) -> set[str]:
        job_ids, now = {lease.job_id for lease in spent_usd}, self._db.now()
        asked, limited = self._db.read(lambda conn: stopping.look(conn, now, job_ids))
        if not limited:
            return asked
        self._write(stopping.note_in_flight, spent_usd)
        now = self._db.now()
        return asked | self._stop(
            self._db.read(lambda conn: stopping.over_limits(conn, now, job_ids))
        )

    def _stop(self, found: Sequence[tuple[str, str]]) -> set[str]:
        for job_id, reason in found:
            self._write(jobs.request_cancel, job_id, reason, EntryKind.STOPPED)
        return {job_id for job_id, _ in found}

    def retry_job(
        self,
        job_id: str,
        quarantined: bool = False,
        numeric_class: str | None = None,
        models: Models | None = None,
    ) -> int:
        change = Change(numeric_class, models)
        if change.is_any and not self.get_job(job_id).state.is_final:
            return self._write(moving.move, job_id, change, quarantined)
        return self._write(jobs.retry, job_id, quarantined, change)

    def fail_job(self, lease: Lease, error: str) -> None:
        self._write(jobs.fail, lease, masked(error))

    # --- leases -----------------------------------------------------------------------------
    def claim_job(self, job_id: str, stage: Stage, owner: str, lease_sec: float) -> JobWork | None:
        return self._write(leasing.claim_job, job_id, stage, owner, lease_sec, self._max_attempts)

    def claim_group(
        self,
        job_id: str,
        index: int,
        stage: Stage,
        owner: str,
        lease_sec: float,
        serves: Serves | None = None,
    ) -> GroupWork | None:
        who = (owner, lease_sec, self._max_attempts)
        claim = partial(self._write, leasing.claim_group, job_id, index, stage, *who, serves)
        return self._pinning(claim, serves, owner, lease_sec)

    def _pinning(
        self,
        claim: Callable[[], GroupWork | None],
        serves: Serves | None,
        owner: str,
        lease_sec: float,
    ) -> GroupWork | None:
        """What comes of a claim, once its job has a class that is served."""
        for _ in range(CLASS_CHANGES):
            try:
                return claim()
            except serving.MovedError:
                continue  # the retry reads the new class
            except serving.UnpinnedError as error:
                assert serves is not None, "else no class is looked at"
                self._write(serving.pin, error.job_id, serves, owner, lease_sec)
        return None

    def claim_next(
        self,
        stage: Stage,
        model: str,
        owner: str,
        lease_sec: float,
        serves: Serves | None = None,
    ) -> GroupWork | None:
        limits = (lease_sec, self._max_attempts, self._weights)
        claim = partial(self._write, choosing.claim_next, stage, model, owner, *limits, serves)
        return self._pinning(claim, serves, owner, lease_sec)

    def close_over(self, limit: int = 1000) -> int:
        now = self._db.now()
        over = self._db.read(lambda conn: choosing.over(conn, now, self._max_attempts, limit))
        for job_id, index, stage in over:  # one at a time: each locks its job's row first
            self._write(leasing.close_group, job_id, index, stage, self._max_attempts)
        return len(over)

    def heartbeat(self, leases: Sequence[Lease], lease_sec: float) -> Beat:
        if not leases:
            return Beat(set(), set(), set())
        return self._write(heartbeats.heartbeat, leases, lease_sec)

    def release(
        self, lease: Lease, error: str, forgiven: bool = False, whole: bool = False
    ) -> Released:
        return self._write(
            leasing.release, lease, masked(error), forgiven, whole, self._max_attempts
        )

    def cancel_group(self, lease: Lease) -> None:
        self._write(groups.cancel, lease)

    def cut_group(self, lease: Lease, keep: int) -> int:
        return self._write(cutting.give_back, lease, keep)

    def want_cut(
        self, model: str, owner: str, serves: Serves | None = None
    ) -> tuple[str, int] | None:
        return self._write(cutting.want, model, owner, serves)

    def due(self, limit: int = 256, job_id: str | None = None) -> list[DueWork]:
        now = self._db.now()
        return self._db.read(lambda conn: sweeping.due(conn, now, limit, job_id))

    def holders(self, job_id: str) -> list[str]:
        now = self._db.now()
        return self._db.read(lambda conn: leasing.holders(conn, now, job_id))

    def expire_leases(self, job_id: str, owner: str) -> int:
        return self._write(leasing.expire, job_id, owner)

    def skip_proposals(self, patience_sec: float) -> list[tuple[str, int]]:
        return self._write(sweeping.skip_proposals, patience_sec)

    # --- ingest -----------------------------------------------------------------------------
    def add_groups(
        self,
        lease: Lease,
        groups: Sequence[NewGroup],
        rejected: Sequence[RejectedRow],
        next_row: int,
        cursor: SourcePosition,
        from_row: int | None = None,
    ) -> None:
        self._write(jobs.add_groups, lease, groups, rejected, next_row, cursor, from_row)

    def finish_ingest(
        self,
        lease: Lease,
        rows_total: int,
        models: Mapping[str, Any],
        from_row: int | None = None,
    ) -> None:
        self._write(jobs.finish_ingest, lease, rows_total, models, from_row)

    def pause_ingest(self, lease: Lease, most_open: int) -> int:
        return self._write(stopping.pause_ingest, lease, most_open)

    def pin_models(self, lease: Lease, models: Models) -> None:
        self._write(jobs.pin_models, lease, models)

    def note_report(self, lease: Lease, values: Mapping[str, Any]) -> None:
        self._write(jobs.note_report, lease, values)

    # --- groups -----------------------------------------------------------------------------
    def advance(
        self,
        lease: Lease,
        to: Stage,
        artefact: Artefact | None,
        timing: StageTiming,
        spent: Spent | None = None,
    ) -> None:
        rules.check_step(lease.stage, to, artefact is not None)
        self._write(groups.advance, lease, to, artefact, timing, spent)

    def commit_group(
        self,
        lease: Lease,
        completions: Sequence[CompletionRecord],
        timing: StageTiming,
        report: Mapping[str, float],
    ) -> Stage | None:
        return self._write(groups.commit, lease, completions, timing, report)

    def keep_part(
        self,
        lease: Lease,
        completions: Sequence[CompletionRecord],
        timing: StageTiming,
        report: Mapping[str, float],
        spent: Spent | None = None,
    ) -> None:
        self._write(groups.keep_part, lease, completions, timing, report, spent)

    def kept_rows(self, job_id: str, index: int | None = None) -> set[int]:
        return self._db.read(lambda conn: stopping.kept_rows(conn, job_id, index))

    # --- publish ----------------------------------------------------------------------------
    def completions(
        self, job_id: str, batch: int = 1000, details: bool = True
    ) -> Iterator[CompletionRecord]:
        return reading.completions(self._db, job_id, batch, details)

    def rejected(self, job_id: str) -> Iterator[RejectedRow]:
        return reading.rejected(self._db, job_id)

    def failed_groups(self, job_id: str) -> list[tuple[int, str, Prompts, str]]:
        return self._db.read(lambda conn: reading.failed_groups(conn, job_id))

    def prompts_of(self, job_id: str, index: int) -> Prompts | None:
        return self._db.read(lambda conn: reading.prompts_of(conn, job_id, index))

    def finish_job(
        self,
        lease: Lease,
        state: JobState,
        error: str | None = None,
        manifest: PublishedManifest | None = None,
    ) -> None:
        rules.check_final(state)
        self._write(jobs.finish, lease, state, error and masked(error), manifest)

    # --- what drafting taught ---------------------------------------------------------------
    def note_decisions(self, job_id: str, decisions: Sequence[Decision]) -> None:
        if decisions:
            self._write(learning.note_decisions, job_id, decisions)

    def decisions(self, job_id: str) -> list[Decision]:
        return self._db.read(lambda conn: learning.decisions(conn, job_id))

    def keep_knowledge(self, key: str, state: Mapping[str, Any]) -> None:
        self._write(learning.keep_knowledge, key, state)

    def knowledge(self, key: str) -> Mapping[str, Any] | None:
        return self._db.read(lambda conn: learning.knowledge(conn, key))

    def learn_acceptance(
        self, tenant: str, job_name: str, counts: Sequence[AcceptanceCount]
    ) -> None:
        if counts:
            self._write(learning.learn_acceptance, tenant, job_name, counts)

    def acceptance(self, tenant: str, job_name: str) -> list[AcceptanceCount]:
        return self._db.read(lambda conn: learning.acceptance(conn, tenant, job_name))

    def past_outputs(
        self, tenant: str, job_name: str, vocabulary: str, max_tokens: int, except_job: str
    ) -> Iterator[PastOutput]:
        return learning.past_outputs(self._db, tenant, job_name, vocabulary, max_tokens, except_job)

    def close(self) -> None:
        """Close the pool's connections."""
        self._db.close()
