"""The store in SQL: each method is a transaction or a few over a neighbouring file's statements.

`contract.py` says what the methods do. Those that are one transaction stand in a line each: a
neighbouring file's function, and the kind of transaction that runs it.
"""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from specbatch.pipeline.ledger.fair_share import Turn
from specbatch.pipeline.ledger.sql import (
    audit_log,
    by_tenant,
    jobs,
    learning,
    leases,
    notifications,
    pinning,
    placing,
    purging,
    reading,
    registry,
    reusing,
    reviewing,
    rolling_out,
    schedules,
    serving,
    splitting,
    staging,
    stopping,
    sweeping,
    switching,
    time,
    usage,
)
from specbatch.pipeline.ledger.sql import budgets as sql_budgets
from specbatch.pipeline.ledger.sql import claim_next as sql_claim_next
from specbatch.pipeline.ledger.sql import figures as sql_figures
from specbatch.pipeline.ledger.sql import groups as sql_groups
from specbatch.pipeline.ledger.sql.leases import Claimer
from specbatch.pipeline.ledger.sql.transactions import RETRY_SEC, Now, Transactions
from specbatch.schemas.encryption import Cipher
from specbatch.schemas.fingerprint import Models
from specbatch.schemas.numeric_class import Change, Serves
from specbatch.schemas.placement import Site
from specbatch.schemas.records import GroupWork, JobRow, JobWork, Lease, NewJob, Released, Stage
from specbatch.schemas.staging import PartClaim, PartPlace

P = ParamSpec("P")
T = TypeVar("T")

CLASS_CHANGES = 5  # of a job, while one claim is made


def _reads(
    work: Callable[Concatenate[Connection, P], T],
) -> Callable[Concatenate[SqlStore, P], T]:
    """A method that reads in one transaction."""

    def method(self: SqlStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._db.read(lambda conn: work(conn, *args, **kwargs))

    return method


def _reads_now(
    work: Callable[Concatenate[Connection, Now, P], T],
) -> Callable[Concatenate[SqlStore, P], T]:
    """A method that reads in one transaction, and compares with the store's time."""

    def method(self: SqlStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._db.read(lambda conn: work(conn, self._db.now(), *args, **kwargs))

    return method


def _writes(
    work: Callable[Concatenate[Connection, Now, P], T],
) -> Callable[Concatenate[SqlStore, P], T]:
    """A method that writes in one transaction."""

    def method(self: SqlStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._db.write(lambda conn: work(conn, self._db.now(), *args, **kwargs))

    return method


def _writes_once(
    work: Callable[Concatenate[Connection, Now, P], T],
) -> Callable[Concatenate[SqlStore, P], T]:
    """The same for what another time would be done again, or refused with an error.

    What names a fencing token is never done again. A claim that nobody knows of ends as a lease.
    A decision or a count of acceptance that is noted twice is not worth a statement.
    """

    def method(self: SqlStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._db.write_once(lambda conn: work(conn, self._db.now(), *args, **kwargs))

    return method


def _pages(
    work: Callable[Concatenate[Transactions, P], T],
) -> Callable[Concatenate[SqlStore, P], T]:
    """A method that makes its own transactions, most often one a page."""

    def method(self: SqlStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return work(self._db, *args, **kwargs)

    return method


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
        lineage: bool = False,
        site: Site | None = None,
    ) -> None:
        """`weights` are the tenants' shares, 1 where none is given.

        `cipher` encrypts texts; without one they are not encrypted, and encrypted ones cannot be
        read. `actor` is whom the audit log names; None: the user and the machine. `lineage`: starts
        and ends of jobs are queued for OpenLineage. `site`: where this worker is; it claims nothing
        of jobs that may not be worked on there. None: that does not matter.
        """
        self._weights = dict(weights or {})
        self._db = Transactions(url, clock, retry_sec, actor or whoami(), cipher, lineage)
        self._max_attempts = max_attempts
        self._site = site

    def __repr__(self) -> str:
        return f"SqlStore({self._db.shown_url})"

    # --- jobs -------------------------------------------------------------------------------
    get_job = _reads(jobs.row)
    jobs_of_ids = _reads(jobs.of_ids)
    job_of_key = _reads(reading.job_of_key)
    revision = _reads(reading.revision)
    list_jobs = _reads(jobs.newest)
    progress = _reads(sql_figures.progress)
    progress_of = _reads(sql_figures.progress_of)
    request_cancel = _writes_once(jobs.request_cancel)
    fail_job = _writes(jobs.fail)
    give_up_job = _writes(jobs.give_up)
    _make_month = _writes(jobs.make_month)
    _create = _writes_once(jobs.create)
    _cancelled = _reads_now(stopping.cancelled)
    _note_in_flight = _writes(stopping.note_in_flight)
    _over_limits = _reads_now(stopping.over_limits)
    _exhausted = _reads_now(sql_budgets.exhausted)
    _stop_if_over = _writes(stopping.stop)
    _move = _writes_once(pinning.move)
    _retry = _writes_once(jobs.retry)

    def create_job(self, job: NewJob) -> tuple[JobRow, bool]:
        self._make_month()
        return self._create(job)

    def stop_overdue(self) -> set[str]:
        return self._stop([*self._over_limits(), *self._exhausted()])

    def cancelled_jobs(self, spent_usd: Mapping[Lease, float]) -> set[str]:
        job_ids = {lease.job_id for lease in spent_usd}
        asked, limited = self._cancelled(job_ids)
        if not limited:
            return asked
        self._note_in_flight(spent_usd)
        return asked | self._stop(self._over_limits(job_ids))

    def _stop(self, found: Sequence[tuple[str, str]]) -> set[str]:
        return {job_id for job_id, _ in found if self._stop_if_over(job_id)}

    def retry_job(
        self,
        job_id: str,
        quarantined: bool = False,
        numeric_class: str | None = None,
        models: Models | None = None,
    ) -> int:
        change = Change(numeric_class, models)
        if change.is_any and not self.get_job(job_id).state.is_final:
            return self._move(job_id, change, quarantined)
        return self._retry(job_id, quarantined, change)

    reviews = _reads(reviewing.reviews)
    review_job = _writes_once(reviewing.review)

    # --- leases -----------------------------------------------------------------------------
    heartbeat = _writes(leases.heartbeat)
    cancel_group = _writes(sql_groups.cancel)
    split_group = _writes_once(splitting.split_group)
    due = _reads_now(sweeping.due)
    holders = _reads_now(leases.holders)
    holders_of = _reads_now(leases.holders_of)
    expire_leases = _writes(leases.expire)
    skip_proposals = _writes(sweeping.skip_proposals)
    _claim_job = _writes(leases.claim_job)
    _claim_group = _writes(leases.claim_group)
    _claim_next = _writes(sql_claim_next.claim_next)
    _ask_for_split = _writes(splitting.ask_for_split)
    _in_turn = _reads_now(sql_claim_next.in_turn)
    _close_group = _writes(leases.close_group)
    _closable = _reads_now(sweeping.closable)
    _pin = _writes(pinning.pin)
    _release = _writes(leases.release)

    def claim_job(self, job_id: str, stage: Stage, owner: str, lease_sec: float) -> JobWork | None:
        return self._claim_job(self._claimer(stage, owner, lease_sec), job_id)

    def _claimer(
        self, stage: Stage, owner: str, lease_sec: float, serves: Serves | None = None
    ) -> Claimer:
        return Claimer(stage, owner, lease_sec, self._max_attempts, serves, self._site)

    def claim_group(
        self,
        job_id: str,
        index: int,
        stage: Stage,
        owner: str,
        lease_sec: float,
        serves: Serves | None = None,
    ) -> GroupWork | None:
        claimer = self._claimer(stage, owner, lease_sec, serves)
        return self._pinning(claimer, lambda: self._claim_group(claimer, job_id, index))

    def claim_next(
        self,
        stage: Stage,
        model: str,
        owner: str,
        lease_sec: float,
        serves: Serves | None = None,
        jobs: Collection[str] | None = None,
    ) -> GroupWork | None:
        claimer = self._claimer(stage, owner, lease_sec, serves)
        return self._pinning(claimer, lambda: self._claim_next(claimer, model, self._weights, jobs))

    def ask_for_split(
        self,
        model: str,
        owner: str,
        serves: Serves | None = None,
        jobs: Collection[str] | None = None,
    ) -> tuple[str, int] | None:
        return self._ask_for_split(model, owner, serves, self._site, jobs)

    def in_turn(self, job_ids: Sequence[str], running: str | None = None) -> list[Turn]:
        return self._in_turn(job_ids, self._weights, running)

    def _pinning(self, claimer: Claimer, claim: Callable[[], GroupWork | None]) -> GroupWork | None:
        """Claim, after the job has pinned a class that the owner serves."""
        for _ in range(CLASS_CHANGES):
            try:
                return claim()
            except pinning.MovedError:
                continue  # the retry reads the new class
            except pinning.UnpinnedError as error:
                assert claimer.serves is not None, "only claims with `serves` look at classes"
                self._pin(error.job_id, claimer.serves, claimer.owner, claimer.lease_sec)
        return None

    def close_over(self, limit: int = 1000) -> int:
        found = self._closable(self._max_attempts, limit)
        for job_id, index, stage in found:  # one at a time: each locks its job's row first
            self._close_group(job_id, index, stage, self._max_attempts)
        return len(found)

    def release(
        self, lease: Lease, error: str, forgiven: bool = False, whole: bool = False
    ) -> Released:
        return self._release(lease, error, forgiven, whole, self._max_attempts)

    # --- ingest -----------------------------------------------------------------------------
    add_groups = _writes_once(jobs.add_groups)
    finish_ingest = _writes(jobs.finish_ingest)
    pause_ingest = _writes(jobs.pause_ingest)
    pin_models = _writes(jobs.pin_models)
    note_report = _writes(jobs.note_report)

    # --- groups -----------------------------------------------------------------------------
    advance = _writes(sql_groups.advance)
    commit_group = _writes(sql_groups.commit)
    keep_part = _writes(sql_groups.keep_part)
    kept_rows = _reads(reading.kept_rows)

    # --- publish ----------------------------------------------------------------------------
    completions = _pages(reading.completions)
    rejected = _pages(reading.rejected)
    failed_groups = _reads(reading.failed_groups)
    prompts_of = _reads(reading.prompts_of)
    finish_job = _writes(jobs.finish)
    first_unrecorded = _reads(staging.first_unrecorded)
    _next_part = _reads_now(staging.next_part)
    rows_between = _reads(staging.rows_between)
    _claim_part = _writes(staging.claim_part)
    extend_part = _writes(staging.extend_part)
    note_part = _writes(staging.note_part)
    staged_parts = _reads(staging.staged_parts)

    def next_part(self, job_id: str) -> PartPlace | None:
        return self._next_part(self._max_attempts, job_id)

    def claim_part(self, job_id: str, place: PartPlace, lease_sec: float) -> PartClaim | None:
        return self._claim_part(self._max_attempts, job_id, place, lease_sec)

    # --- what drafting taught ---------------------------------------------------------------
    note_decisions = _writes(learning.note_decisions)
    decisions = _reads(learning.decisions)
    keep_knowledge = _writes(learning.keep_knowledge)
    knowledge = _reads(learning.knowledge)
    learn_acceptance = _writes(learning.learn_acceptance)
    acceptance = _reads(learning.acceptance)
    acceptance_days = _reads(learning.acceptance_days)
    slow_falls = _reads_now(learning.slow_falls)
    supersede_acceptance = _writes_once(learning.supersede_acceptance)
    forget_old_acceptance = _writes(learning.forget_old_acceptance)
    past_outputs = _pages(learning.past_outputs)
    offer_answers = _writes(reusing.offer)
    answered = _reads(reusing.answered)

    # --- the model registry -----------------------------------------------------------------
    add_model = _writes_once(registry.add_model)
    models = _reads(registry.models)
    deployments = _reads(registry.deployments)
    promote = _writes_once(registry.promote)
    roll_back = _writes_once(registry.roll_back)
    retire = _writes_once(registry.retire)
    add_pair_trial = _writes(registry.add_pair_trial)
    pair_trials = _reads(registry.pair_trials)
    begin_rollout = _writes_once(rolling_out.begin)
    rollouts = _reads(rolling_out.rollouts)
    rollout_groups = _reads(rolling_out.groups)
    observe_rollout = _writes(rolling_out.observe)
    stop_rollout = _writes_once(rolling_out.stop)
    settle_rollouts = _writes_once(rolling_out.settle)

    # --- drafting switched off by an operator -----------------------------------------------
    switch_drafting_off = _writes_once(switching.switch_off)
    switch_drafting_on = _writes_once(switching.switch_on)
    draft_switches = _reads(switching.switches)

    # --- budgets of tenants -----------------------------------------------------------------
    set_budget = _writes_once(sql_budgets.set_budget)
    remove_budget = _writes_once(sql_budgets.remove_budget)
    budgets = _reads(sql_budgets.budgets)
    tenant_accounts = _reads_now(sql_budgets.tenant_accounts)
    budget_shortfalls = _reads_now(sql_budgets.shortfalls)
    waiting_for_budget = _reads_now(sql_budgets.waiting_for_budget)

    # --- device time ------------------------------------------------------------------------
    begin_session = _writes(time.begin)
    announce = _writes(time.announce)
    report_time = _writes(time.report)
    end_session = _writes(time.end)
    sessions = _reads(time.sessions)
    time_slices = _pages(time.slices)
    job_times = _reads(time.job_times)
    row_times = _reads(time.row_times)
    report_usage = _writes(usage.report)
    stage_usage = _reads(usage.of_jobs)
    _silent_sessions = _reads_now(time.silent)
    _end_silent = _writes(time.end_silent)

    def end_silent_sessions(self, patience_sec: float) -> list[str]:
        found = self._silent_sessions(patience_sec)
        return sorted(i for i in found if self._end_silent(i, patience_sec))

    # --- placement by price -----------------------------------------------------------------
    alive = _reads_now(placing.alive)
    open_jobs = _reads(placing.open_jobs)

    # --- worker processes and schedules -----------------------------------------------------
    report_process = _writes(sql_figures.report_process)
    forget_process = _writes(sql_figures.forget_process)
    forget_silent_processes = _writes(sql_figures.forget_silent_processes)
    note_schedule_run = _writes_once(schedules.note)
    note_schedule_runs = _writes_once(schedules.note_all)
    claim_schedule_run = _writes_once(schedules.claim)
    hold_schedule_run = _writes_once(schedules.hold)
    schedule_runs = _reads(schedules.newest)

    # --- notifications ----------------------------------------------------------------------
    due_notifications = _reads_now(notifications.due)
    take_notification = _writes(notifications.take)
    note_sent = _writes(notifications.sent)
    note_not_sent = _writes(notifications.not_sent)
    notifications_of = _reads(notifications.of_job)

    # --- what is served ---------------------------------------------------------------------
    add_file = _writes_once(serving.add_file)
    file = _reads(serving.file)
    files = _reads(serving.files)
    file_ids = _reads(serving.file_ids)
    delete_file = _writes_once(serving.delete_file)
    add_batch = _writes_once(serving.add_batch)
    batch = _reads(serving.batch)
    batches = _reads(serving.batches)
    batch_of_file = _reads(serving.batch_of_file)
    open_batches = _reads(serving.open_batches)
    begin_batch = _writes(serving.begin_batch)
    note_batch_job = _writes(serving.note_batch_job)
    note_batch_waits = _writes(serving.note_batch_waits)
    cancel_batch = _writes(serving.cancel_batch)
    end_batch = _writes(serving.end_batch)
    add_api_key = _writes_once(serving.add_api_key)
    api_key = _reads_now(serving.api_key)
    api_keys = _reads_now(serving.api_keys)
    revoke_api_key = _writes(serving.revoke_api_key)
    tenant_job = _reads(by_tenant.job)
    tenant_jobs = _reads(by_tenant.jobs)
    tenant_states = _reads(by_tenant.states)
    tenant_use = _reads(by_tenant.use)

    # --- figures ----------------------------------------------------------------------------
    figures = _reads_now(sql_figures.figures)
    backlog = _reads_now(sql_figures.backlog)
    group_figures = _pages(sql_figures.of_groups)
    row_figures = _pages(sql_figures.of_rows)

    # --- audits -----------------------------------------------------------------------------
    note_action = _writes_once(jobs.note_action)
    log = _pages(audit_log.log)
    log_head = _reads(audit_log.head)
    logged_job = _reads(audit_log.logged_job)
    job_facts = _pages(audit_log.job_facts)
    kept = _pages(audit_log.kept)
    kept_one = _pages(audit_log.kept_one)
    groups = _pages(audit_log.groups)
    accounts = _reads(audit_log.accounts)
    keep_audit = _writes_once(audit_log.keep_audit)
    audits = _reads(audit_log.audits)
    correctness = _reads(audit_log.correctness)

    # --- privacy ----------------------------------------------------------------------------
    recorded_groups = _reads(reading.recorded_groups)
    ended_jobs = _reads_now(purging.ended_jobs)
    purge = _pages(purging.purge)

    def close(self) -> None:
        """Close the pool's connections."""
        self._db.close()


def whoami() -> str:
    """`user@host` of this process: the actor that the audit log names by default."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = f"uid-{os.getuid()}"
    return f"{user}@{socket.gethostname()}"
