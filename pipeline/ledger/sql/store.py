"""The store in SQL: each method is a transaction or a few over a neighbouring file's statements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from specbatch.pipeline.audit.accounts import AccountRows
from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.actor import whoami
from specbatch.pipeline.ledger.contract import MOST_JOBS
from specbatch.pipeline.ledger.sql import (
    audit_log,
    claim_next,
    figures,
    groups,
    jobs,
    learning,
    leases,
    pinning,
    purging,
    reading,
    schedules,
    splitting,
    stopping,
    sweeping,
    time,
)
from specbatch.pipeline.ledger.sql.leases import heartbeat as extend_leases
from specbatch.pipeline.ledger.sql.transactions import RETRY_SEC, Now, Transactions
from specbatch.schemas.audit import (
    AuditRecord,
    Correctness,
    EntryKind,
    Head,
    KeptCompletion,
    LogEntry,
    PublishedManifest,
)
from specbatch.schemas.backlog import Backlog
from specbatch.schemas.encryption import Cipher
from specbatch.schemas.figures import StoreFigures
from specbatch.schemas.fingerprint import Models
from specbatch.schemas.job_figures import GroupFigures, RowFigures
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.masking import masked
from specbatch.schemas.numeric_class import Change, Serves
from specbatch.schemas.presence import WorkerProcess
from specbatch.schemas.provenance import Ticks
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
from specbatch.schemas.schedules import RUNS, RunState, ScheduleRun
from specbatch.schemas.speculation import AcceptanceCount, Decision, PastOutput
from specbatch.schemas.timekeeping import (
    Attempt,
    JobTime,
    NewSession,
    RowTime,
    SessionRow,
    SessionTime,
    Spent,
    TimeSlice,
)

P = ParamSpec("P")
T = TypeVar("T")

CLASS_CHANGES = 5  # of a job, while one claim is made


class SqlStore:
    """`Store` on SQLite or PostgreSQL. Threads may share it; processes make their own.

    The tables must be there: `migrate.open_store` sees to that. `clock` replaces the store's time
    (on PostgreSQL the server's) in tests. Every method raises `StoreError` when the database
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
        """`weights` are the tenants' shares, 1 where none is given.

        `cipher` encrypts texts; without one they are not encrypted, and encrypted ones cannot be
        read. `actor` is whom the audit log names; None: the user and the machine.
        """
        self._weights = dict(weights or {})
        self._db = Transactions(url, clock, retry_sec, actor or whoami(), cipher)
        self._max_attempts = max_attempts

    def _read(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return self._db.read(lambda conn: work(conn, *args, **kwargs))

    def _write(
        self, work: Callable[Concatenate[Connection, Now, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return self._db.write(lambda conn: work(conn, self._db.now(), *args, **kwargs))

    def __repr__(self) -> str:
        return f"SqlStore({self._db.shown_url})"

    # --- jobs -------------------------------------------------------------------------------
    def create_job(self, job: NewJob) -> tuple[JobRow, bool]:
        self._write(jobs.make_month)
        return self._write(jobs.create, job)

    def get_job(self, job_id: str) -> JobRow:
        return self._read(jobs.row, job_id)

    def job_of_key(self, key: str) -> JobRow | None:
        return self._read(reading.job_of_key, key)

    def list_jobs(self, limit: int = 50, state: JobState | None = None) -> list[JobRow]:
        return self._read(jobs.newest, limit, state)

    def progress(self, job_id: str) -> JobProgress:
        return self._read(figures.progress, job_id)

    def request_cancel(self, job_id: str, reason: str | None = None) -> JobRow:
        return self._write(jobs.request_cancel, job_id, reason)

    def stop_overdue(self) -> set[str]:
        now = self._db.now()
        return self._stop(self._read(stopping.over_limits, now))

    def cancelled_jobs(self, spent_usd: Mapping[Lease, float]) -> set[str]:
        job_ids, now = {lease.job_id for lease in spent_usd}, self._db.now()
        asked, limited = self._read(stopping.cancelled, now, job_ids)
        if not limited:
            return asked
        self._write(stopping.note_in_flight, spent_usd)
        now = self._db.now()
        return asked | self._stop(self._read(stopping.over_limits, now, job_ids))

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
            return self._write(pinning.move, job_id, change, quarantined)
        return self._write(jobs.retry, job_id, quarantined, change)

    def fail_job(self, lease: Lease, error: str) -> None:
        self._write(jobs.fail, lease, masked(error))

    # --- leases -----------------------------------------------------------------------------
    def claim_job(self, job_id: str, stage: Stage, owner: str, lease_sec: float) -> JobWork | None:
        return self._write(leases.claim_job, job_id, stage, owner, lease_sec, self._max_attempts)

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
        claim = partial(self._write, leases.claim_group, job_id, index, stage, *who, serves)
        return self._pinning(claim, serves, owner, lease_sec)

    def _pinning(
        self,
        claim: Callable[[], GroupWork | None],
        serves: Serves | None,
        owner: str,
        lease_sec: float,
    ) -> GroupWork | None:
        """Claim, after the job has pinned a class that the owner serves."""
        for _ in range(CLASS_CHANGES):
            try:
                return claim()
            except pinning.MovedError:
                continue  # the retry reads the new class
            except pinning.UnpinnedError as error:
                assert serves is not None, "only claims with `serves` look at classes"
                self._write(pinning.pin, error.job_id, serves, owner, lease_sec)
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
        claim = partial(self._write, claim_next.claim_next, stage, model, owner, *limits, serves)
        return self._pinning(claim, serves, owner, lease_sec)

    def close_over(self, limit: int = 1000) -> int:
        now = self._db.now()
        over = self._read(sweeping.over, now, self._max_attempts, limit)
        for job_id, index, stage in over:  # one at a time: each locks its job's row first
            self._write(leases.close_group, job_id, index, stage, self._max_attempts)
        return len(over)

    def heartbeat(self, leases: Sequence[Lease], lease_sec: float) -> Beat:
        if not leases:
            return Beat(set(), set(), set())
        return self._write(extend_leases, leases, lease_sec)

    def release(
        self, lease: Lease, error: str, forgiven: bool = False, whole: bool = False
    ) -> Released:
        return self._write(
            leases.release, lease, masked(error), forgiven, whole, self._max_attempts
        )

    def cancel_group(self, lease: Lease) -> None:
        self._write(groups.cancel, lease)

    def cut_group(self, lease: Lease, keep: int) -> int:
        return self._write(splitting.give_back, lease, keep)

    def want_cut(
        self, model: str, owner: str, serves: Serves | None = None
    ) -> tuple[str, int] | None:
        return self._write(splitting.want, model, owner, serves)

    def due(self, limit: int = 256, job_id: str | None = None) -> list[DueWork]:
        now = self._db.now()
        return self._read(sweeping.due, now, limit, job_id)

    def holders(self, job_id: str) -> list[str]:
        now = self._db.now()
        return self._read(leases.holders, now, job_id)

    def expire_leases(self, job_id: str, owner: str) -> int:
        return self._write(leases.expire, job_id, owner)

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
        return self._write(jobs.pause_ingest, lease, most_open)

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
        return self._read(reading.kept_rows, job_id, index)

    # --- publish ----------------------------------------------------------------------------
    def completions(
        self, job_id: str, batch: int = 1000, details: bool = True
    ) -> Iterator[CompletionRecord]:
        return reading.completions(self._db, job_id, batch, details)

    def rejected(self, job_id: str) -> Iterator[RejectedRow]:
        return reading.rejected(self._db, job_id)

    def failed_groups(self, job_id: str) -> list[tuple[int, str, Prompts, str]]:
        return self._read(reading.failed_groups, job_id)

    def prompts_of(self, job_id: str, index: int) -> Prompts | None:
        return self._read(reading.prompts_of, job_id, index)

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
        return self._read(learning.decisions, job_id)

    def keep_knowledge(self, key: str, state: Mapping[str, Any]) -> None:
        self._write(learning.keep_knowledge, key, state)

    def knowledge(self, key: str) -> Mapping[str, Any] | None:
        return self._read(learning.knowledge, key)

    def learn_acceptance(
        self, tenant: str, job_name: str, counts: Sequence[AcceptanceCount]
    ) -> None:
        if counts:
            self._write(learning.learn_acceptance, tenant, job_name, counts)

    def acceptance(self, tenant: str, job_name: str) -> list[AcceptanceCount]:
        return self._read(learning.acceptance, tenant, job_name)

    def past_outputs(
        self, tenant: str, job_name: str, vocabulary: str, max_tokens: int, except_job: str
    ) -> Iterator[PastOutput]:
        return learning.past_outputs(self._db, tenant, job_name, vocabulary, max_tokens, except_job)

    # --- device time ------------------------------------------------------------------------
    def begin_session(self, session: NewSession) -> None:
        self._write(time.begin, session)

    def announce(self, session_id: str, serves: Serves) -> None:
        self._write(time.announce, session_id, serves)

    def report_time(self, session: SessionTime, attempts: Mapping[Attempt, Ticks]) -> None:
        self._write(time.report, session, attempts)

    def end_session(self, session: SessionTime, attempts: Mapping[Attempt, Ticks]) -> None:
        self._write(time.end, session, attempts)

    def end_silent_sessions(self, patience_sec: float) -> list[str]:
        found = self._read(time.silent, self._db.now(), patience_sec)
        return sorted(i for i in found if self._write(time.end_silent, i, patience_sec))

    def sessions(
        self, job_id: str | None = None, session_id: str | None = None
    ) -> list[SessionRow]:
        return self._read(time.sessions, job_id, session_id)

    def time_slices(
        self, job_id: str | None = None, session_id: str | None = None
    ) -> Iterator[TimeSlice]:
        return time.slices(self._db, job_id, session_id)

    def job_times(self, job_id: str | None = None) -> Sequence[JobTime]:
        return self._read(time.job_times, job_id)

    def row_times(self, job_id: str | None = None) -> Sequence[RowTime]:
        return self._read(time.row_times, job_id)

    # --- worker processes -------------------------------------------------------------------
    def report_process(self, process: WorkerProcess, trouble: str | None) -> None:
        self._write(figures.report_process, process, trouble)

    def forget_process(self, process_id: str) -> None:
        self._write(figures.forget_process, process_id)

    def forget_silent_processes(self, patience_sec: float) -> int:
        return self._write(figures.forget_silent_processes, patience_sec)

    # --- schedules --------------------------------------------------------------------------
    def note_schedule_run(self, run: ScheduleRun, replaces: Collection[RunState] = ()) -> bool:
        return self._write(schedules.note, run, replaces)

    def note_schedule_runs(
        self, runs: Sequence[ScheduleRun], then: Sequence[ScheduleRun] = ()
    ) -> list[ScheduleRun]:
        return self._write(schedules.note_all, runs, then)

    def schedule_runs(
        self,
        name: str | None = None,
        limit: int = 100,
        states: Collection[RunState] = RUNS,
        logical_at: float | None = None,
        by_noted: bool = False,
        upto: float | None = None,
    ) -> list[ScheduleRun]:
        return self._read(schedules.newest, name, limit, states, logical_at, by_noted, upto)

    # --- figures ----------------------------------------------------------------------------
    def figures(self) -> StoreFigures:
        return self._read(figures.figures, self._db.now())

    def backlog(self) -> Backlog:
        return self._read(figures.backlog, self._db.now())

    def group_figures(self, job_id: str) -> Iterator[GroupFigures]:
        return figures.of_groups(self._db, job_id)

    def row_figures(self, job_id: str, batch: int = 1000) -> Iterator[RowFigures]:
        return figures.of_rows(self._db, job_id, batch)

    # --- audits -----------------------------------------------------------------------------
    def note_action(self, job_id: str, kind: EntryKind, payload: Mapping[str, Any]) -> Head:
        return self._write(jobs.note_action, job_id, kind, payload)

    def log(self, job_id: str, after: int = 0, batch: int = 64) -> Iterator[LogEntry]:
        return audit_log.log(self._db, job_id, after, batch)

    def log_head(self, job_id: str) -> Head:
        return self._read(audit_log.head, job_id)

    def logged_job(self, job_id: str) -> str:
        return self._read(audit_log.logged_job, job_id)

    def job_facts(self, job_id: str) -> Mapping[str, Any] | None:
        return audit_log.job_facts(self._db, job_id)

    def kept(self, job_id: str, batch: int = 500) -> Iterator[KeptCompletion]:
        return audit_log.kept(self._db, job_id, batch)

    def kept_one(self, job_id: str, row: int, sample: int) -> KeptCompletion | None:
        return audit_log.kept_one(self._db, job_id, row, sample)

    def groups(self, job_id: str) -> Iterator[tuple[int, Prompts]]:
        return audit_log.groups(self._db, job_id)

    def accounts(self, job_id: str) -> AccountRows:
        return self._read(audit_log.accounts, job_id)

    def keep_audit(self, audit: AuditRecord) -> None:
        self._write(audit_log.keep_audit, audit)

    def audits(self, job_id: str) -> list[AuditRecord]:
        return self._read(audit_log.audits, job_id)

    def correctness(self, since: float = 0.0) -> Correctness:
        return self._read(audit_log.correctness, since)

    # --- privacy ----------------------------------------------------------------------------
    def recorded_groups(self, job_id: str) -> list[tuple[int, Prompts, Artefact | None]]:
        return self._read(reading.recorded_groups, job_id)

    def ended_jobs(
        self,
        age_sec: float,
        tenant: str | None = None,
        limit: int = MOST_JOBS,
        private_only: bool = False,
        after: JobRow | None = None,
    ) -> list[JobRow]:
        now = self._db.now()
        return self._read(purging.ended_jobs, now, age_sec, tenant, limit, private_only, after)

    def purge(
        self, job_id: str, why: str, batch_rows: int = 1000, unfinished: bool = False
    ) -> Iterator[int]:
        return purging.purge(self._db, job_id, why, batch_rows, unfinished)

    def close(self) -> None:
        """Close the pool's connections."""
        self._db.close()
