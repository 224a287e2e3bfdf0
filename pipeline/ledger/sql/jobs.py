"""Statements about whole jobs. Each runs inside a transaction that the caller opened.

Lock order everywhere: the job's row first, its groups after. Whatever may close the last open group
holds the job's row, so two of them cannot both believe that the other is still open.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Executable,
    bindparam,
    case,
    delete,
    exists,
    func,
    insert,
    null,
    or_,
    select,
    text,
    update,
)

from specbatch.pipeline.audit import accounts, entries
from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.sql import audit_log, budgets, notifications
from specbatch.pipeline.ledger.sql import usage as sql_usage
from specbatch.pipeline.ledger.sql.transactions import SERVER_TIME, Now, in_parts, upsert
from specbatch.schemas import lineage, mapper
from specbatch.schemas.audit import EntryKind, Head, PublishedManifest
from specbatch.schemas.errors import JobNotFoundError
from specbatch.schemas.fingerprint import Models
from specbatch.schemas.masking import masked
from specbatch.schemas.months import month_of
from specbatch.schemas.notifications import Event
from specbatch.schemas.numeric_class import NO_CHANGE, Change
from specbatch.schemas.records import (
    JobRow,
    JobState,
    Lease,
    NewGroup,
    NewJob,
    RejectedRow,
    SourcePosition,
    Stage,
)
from specbatch.schemas.spec import check_storable
from specbatch.schemas.staging_tables import Staged
from specbatch.schemas.tables import Group, Job, Rejected, group_is_open
from specbatch.schemas.text_columns import SHOWN_WITHOUT_KEY
from specbatch.schemas.usage import UsageMeter

FREE: dict[str, Any] = {"lease_owner": None, "lease_until": 0.0}  # nobody holds the unit
_CLOSED = (Stage.FAILED.value, Stage.CANCELLED.value)


# --- create and read ------------------------------------------------------------------------


def create(conn: Connection, now: Now, job: NewJob) -> tuple[JobRow, bool]:
    """The new job and True, or the one that is known by its key or id and False."""
    check_storable(job.spec)
    at = audit_log.clock(conn, now)
    values = mapper.job_values(job, at)
    entry = audit_log.begin(conn, at, values)
    statement = upsert(conn.dialect.name, Job).values(**values, **audit_log.new_head(entry))
    made = conn.execute(statement.on_conflict_do_nothing().returning(*Job.__table__.c)).first()
    if made is not None:
        budgets.check_new(conn, now, job)
        audit_log.write_first(conn, entry)
        return mapper.job_row(made), True
    same = Job.job_id == job.job_id
    if job.idempotency_key:
        same = or_(same, Job.idempotency_key == job.idempotency_key)
    # The key's job comes first: it is the one that the caller asks for.
    by_id = case((Job.job_id == job.job_id, 1), else_=0)
    known = mapper.job_row(
        conn.execute(select(*Job.__table__.c).where(same).order_by(by_id)).first()
    )
    rules.check_same_job(known, job)
    return known, False


def make_month(conn: Connection, now: Now) -> int:
    """Make the partition of the current month. Best in a transaction of its own."""
    month = month_of(conn.scalar(select(now)) or 0.0)
    if conn.dialect.name == "postgresql":
        conn.execute(_MAKE_MONTH, {"month": month})
    return month


_MAKE_MONTH = text("SELECT specbatch_month(:month)")


# Made once: programs ask for a job by its id, and to make the statement takes as long as to run it.
_BY_ID = select(*Job.__table__.c).where(Job.job_id == bindparam("job_id"))


def find(conn: Connection, job_id: str) -> Any:
    """The job's row by id, by a unique prefix or name, or the newest by `latest`.

    Raises `JobNotFoundError`.
    """
    exact = conn.execute(_BY_ID, {"job_id": job_id}).first()
    if exact is not None:
        return exact
    rows = _of_prefix(conn, job_id) if len(job_id) >= rules.MIN_PREFIX else []
    if not rows:
        return _named(conn, job_id)
    if problem := rules.find_by_prefix(job_id, [row.job_id for row in rows]):
        raise JobNotFoundError(problem)
    return rows[0]


def _of_prefix(conn: Connection, prefix: str) -> list[Any]:
    """SQLite reads the whole table for it."""
    match = Job.job_id.startswith(prefix, autoescape=True)
    query = select(*Job.__table__.c).where(match).order_by(Job.job_id).limit(rules.MOST_NAMED + 1)
    return [row for row in conn.execute(query) if row.job_id.startswith(prefix)]  # LIKE folds case


def _named(conn: Connection, name: str) -> Any:
    """The row of the only job of this name, or of the newest job for `latest`."""
    newest_first = select(*Job.__table__.c).order_by(Job.created_at.desc(), Job.job_id.desc())
    if name == rules.LATEST:
        found = conn.execute(newest_first.limit(1)).all()
    else:
        found = conn.execute(newest_first.where(Job.name == name).limit(rules.MOST_NAMED + 1)).all()
    if problem := rules.find_by_name(name, [row.job_id for row in found]):
        raise JobNotFoundError(problem)
    return found[0]


def row(conn: Connection, job_id: str) -> JobRow:
    return mapper.job_row(find(conn, job_id))


def of_ids(conn: Connection, job_ids: Collection[str]) -> dict[str, JobRow]:
    query = select(*Job.__table__.c)
    return {
        row.job_id: mapper.job_row(row)
        for some in in_parts(job_ids)
        for row in conn.execute(query.where(Job.job_id.in_(some)))
    }


def newest(conn: Connection, limit: int = 50, state: JobState | None = None) -> list[JobRow]:
    query = select(*Job.__table__.c).order_by(Job.created_at.desc(), Job.job_id.desc()).limit(limit)
    if state is not None:
        query = query.where(Job.state == state.value)
    return [mapper.job_row(row) for row in conn.execute(query)]


# FOR NO KEY UPDATE: inserts of groups and completions (foreign keys) may still continue.
# On PostgreSQL the row comes with the server's time, which audit entries need.
_LOCKS = {
    is_postgres: select(*Job.__table__.c, *([SERVER_TIME.label("locked_at")] * is_postgres))
    .where(Job.job_id == bindparam("of_job"))
    .with_for_update(key_share=True)
    for is_postgres in (True, False)
}


# --- locks and transitions ------------------------------------------------------------------


def lock(conn: Connection, job_id: str) -> Any:
    """The job's row, locked against all other writers; None when there is no such job.

    SQLite needs no row lock, for it has one writer at a time.
    """
    return conn.execute(_LOCKS[conn.dialect.name == "postgresql"], {"of_job": job_id}).first()


def lock_held(conn: Connection, lease: Lease) -> Any:
    """The locked row of the leased job. Raises `FencedError` when the lease is not current."""
    row = lock(conn, lease.job_id) if lease.group_index is None else None
    current = row and (row.generation, row.lease_owner, row.stage)
    if current != (lease.token, lease.owner, lease.stage.value):
        raise rules.fenced(lease)
    return row


def move_if_done(conn: Connection, now: Now, job_id: str, **values: Any) -> Any:
    """Move a RUN job without open groups to PUBLISH, and set `values` whether it moves or not.

    A paused ingest resumes once few enough groups are open. Returns the job's stage and
    `ingest_resumes_at`; None when there is no such job.

    The caller has locked the job's row, and this is a statement of its own: under READ COMMITTED it
    sees every group that was closed before the row was locked.
    """
    parameters = {"of_job": job_id, **{f"new_{name}": value for name, value in values.items()}}
    return conn.execute(_moving_if_done(now, tuple(values)), parameters).first()


@lru_cache(maxsize=16)
def _moving_if_done(now: Now, names: tuple[str, ...]) -> Executable:
    """The statement of `move_if_done`, cached: every group ends with it. `names`: other columns."""
    job_id: BindParameter[str] = bindparam("of_job")
    an_open_group = exists().where(Group.job_id == job_id, group_is_open())
    moves = (Job.stage == Stage.RUN.value) & ~an_open_group
    still_open = (
        select(func.count()).where(Group.job_id == job_id, group_is_open()).scalar_subquery()
    )
    return (
        update(Job)
        .where(Job.job_id == job_id)
        .values(
            stage=case((moves, Stage.PUBLISH.value), else_=Job.stage),
            ready_at=case((moves, now), else_=Job.ready_at),
            ingest_resumes_at=case(  # counted only for a paused ingest
                (Job.ingest_resumes_at.is_(None), null()),
                (still_open <= Job.ingest_resumes_at, null()),
                else_=Job.ingest_resumes_at,
            ),
            **{name: bindparam(f"new_{name}") for name in names},
        )
        .returning(Job.stage, Job.ingest_resumes_at)
    )


def move(conn: Connection, now: Now, job_id: str, to: Stage, **values: Any) -> None:
    """Move the locked job to `to`: free, ready now, with all attempts again."""
    fresh = {"stage": to.value, "ready_at": now, "attempts": 0, "last_error": None, **FREE}
    fresh["ingest_resumes_at"] = None
    conn.execute(update(Job).where(Job.job_id == job_id).values({**fresh, **values}))


def leave_ingest(conn: Connection, now: Now, job_id: str) -> None:
    """Stop reading the locked job's input: RUN while groups are open, else PUBLISH."""
    move(conn, now, job_id, Stage.RUN)
    move_if_done(conn, now, job_id)


def end_unpublished(
    conn: Connection, now: Now, job: Any, error: str | None, actor: str | None = None
) -> None:
    """End the locked job as FAILED, and log it."""
    said = entries.ended(JobState.FAILED.value, error)
    head = audit_log.link(conn, now, job, EntryKind.FAILED, said, actor)
    _end(conn, now, job, JobState.FAILED, error, head)


def _end(
    conn: Connection,
    now: Now,
    job: Any,
    state: JobState,
    error: str | None,
    head: Mapping[str, Any],
) -> None:
    """End the locked job; groups that are still open become CANCELLED, and staged parts count no
    more: a retry may change what they would hold."""
    job_id = job.job_id
    conn.execute(
        update(Group)
        .where(Group.job_id == job_id, group_is_open())
        .values(
            stage=Stage.CANCELLED.value,
            ready_at=now,
            attempts=0,
            last_error=func.coalesce(Group.last_error, rules.JOB_ENDED),
            **FREE,
        )
    )
    conn.execute(delete(Staged).where(Staged.job_id == job_id))
    move(conn, now, job_id, Stage.END, state=state.value, error=error, finished_at=now, **head)
    notifications.add(conn, now, job, head["log_number"], Event(state.value))


# --- cancel and retry -----------------------------------------------------------------------


def request_cancel(
    conn: Connection,
    now: Now,
    job_id: str,
    reason: str | None = None,
    kind: EntryKind = EntryKind.CANCELLED,
) -> JobRow:
    """Keep the first reason."""
    row = lock(conn, find(conn, job_id).job_id)
    if JobState(row.state).is_final:
        return mapper.job_row(row)
    conn.execute(
        update(Group)
        .where(
            Group.job_id == row.job_id,
            Group.stage.in_([stage.value for stage in rules.CANCELLABLE]),
            Group.lease_until <= now,
        )
        .values(stage=Stage.CANCELLED.value, ready_at=now, attempts=0, **FREE)
    )
    unread = (Job.stage == Stage.INGEST.value) & (Job.lease_until <= now)
    stops = conn.scalar(select(Job.job_id).where(Job.job_id == row.job_id, unread))
    if stops:
        move(conn, now, row.job_id, Stage.RUN)
    # The first reason stays. It is not written again: without the key it reads as other words.
    known = {} if row.stop_reason else {"stop_reason": reason}
    head = audit_log.link(conn, now, row, kind, {"reason": reason})
    if kind is EntryKind.STOPPED:
        notifications.add(conn, now, row, head["log_number"], Event.STOPPED)
    move_if_done(conn, now, row.job_id, cancel_requested=True, **known, **head)
    return mapper.job_row(find(conn, row.job_id))


def retry(
    conn: Connection, now: Now, job_id: str, quarantined: bool, change: Change = NO_CHANGE
) -> int:
    """How many units went back to work; with 0 the job is unchanged."""
    found = find(conn, job_id)
    budgets.lock(conn, found.tenant)
    row = lock(conn, found.job_id)
    known = mapper.job_row(row)
    rules.check_retry(known, quarantined, row.ingest_done, change)
    closed: ColumnElement[bool] = Group.stage.in_(_CLOSED)
    if quarantined:
        closed = (Group.stage == Stage.FAILED.value) & (Group.rows == 1)
    groups = conn.execute(
        update(Group)
        .where(Group.job_id == row.job_id, closed)
        .values(stage=_stage_after_retry(), ready_at=now, attempts=0, last_error=None, **FREE)
    ).rowcount
    unpublished = not quarantined and (
        row.state in (JobState.FAILED.value, JobState.CANCELLED.value)
    )
    returns = groups + bool(not row.ingest_done or (unpublished and not groups))
    if returns:
        values: dict[str, Any] = {"cancel_requested": False, "error": None, "finished_at": None}
        limits = _without_reached_limits(conn, row, audit_log.clock(conn, now, row))
        pinned = rules.columns_of(known, change)
        said = entries.retried(quarantined, returns, **limits, moved=pinned)
        head = audit_log.link(conn, now, row, EntryKind.RETRIED, said)
        values |= {"stop_reason": None, **limits, **head, **pinned}
        to = Stage.RUN if row.ingest_done else Stage.INGEST
        move(conn, now, row.job_id, to, state=JobState.RUNNING.value, **values)
        move_if_done(conn, now, row.job_id)
        budgets.check_retried(conn, now, row.job_id, row.tenant)
    return returns


def _without_reached_limits(conn: Connection, job: Any, now: float) -> dict[str, Any]:
    """A retry lifts limits that were reached: they would stop the job at once."""
    is_late = job.deadline_at is not None and job.deadline_at <= now
    is_spent = rules.budget_was_spent(job.stop_reason)
    if job.stop_reason == SHOWN_WITHOUT_KEY and job.budget_usd is not None:
        spent = select(func.sum(Group.device_usd)).where(Group.job_id == job.job_id)
        is_spent = (conn.scalar(spent) or 0.0) >= job.budget_usd
    return {
        "deadline_at": None if is_late else job.deadline_at,
        "budget_usd": None if is_spent else job.budget_usd,
    }


def _stage_after_retry() -> ColumnElement[str]:
    """Where a FAILED or CANCELLED group restarts: finished files are kept."""
    return case(
        (Group.results.is_not(None), Stage.RECORD.value),
        (Group.drafts.is_not(None), Stage.VERIFY.value),
        else_=Group.first_stage,
    )


# --- ingest and publish ---------------------------------------------------------------------


def fail(conn: Connection, now: Now, lease: Lease, error: str) -> None:
    end_unpublished(conn, now, lock_held(conn, lease), masked(error), lease.owner)


def add_groups(
    conn: Connection,
    now: Now,
    lease: Lease,
    groups: Sequence[NewGroup],
    rejected: Sequence[RejectedRow],
    next_row: int,
    cursor: SourcePosition,
    from_row: int | None = None,
    usage: UsageMeter | None = None,
) -> None:
    job = lock_held(conn, lease)
    rules.check_order(lease.job_id, job.groups_total, groups)
    rules.check_place(lease, job.next_row, from_row)
    if groups:
        ready_at = conn.scalar(select(now))  # many rows in one statement need plain values
        conn.execute(
            insert(Group),
            [
                mapper.group_values(
                    lease.job_id,
                    group,
                    Stage.CANCELLED if job.cancel_requested else group.first_stage,
                    ready_at,
                )
                for group in groups
            ],
        )
    if rejected:
        conn.execute(insert(Rejected), [mapper.rejected_values(lease.job_id, r) for r in rejected])
    head: dict[str, Any] = {}
    if groups or rejected:
        said = entries.planned(groups, rejected)
        head = audit_log.link(conn, now, job, EntryKind.PLANNED, said, lease.owner)
    conn.execute(
        update(Job)
        .where(Job.job_id == lease.job_id)
        .values(
            groups_total=Job.groups_total + len(groups),
            rows_rejected=Job.rows_rejected + len(rejected),
            prompt_tokens=Job.prompt_tokens + sum(group.prompt_tokens for group in groups),
            next_row=next_row,
            cursor=asdict(cursor),
            attempts=0,
            **head,
        )
    )
    sql_usage.keep(conn, lease, usage)


def finish_ingest(
    conn: Connection,
    now: Now,
    lease: Lease,
    rows_total: int,
    models: Mapping[str, Any],
    from_row: int | None = None,
    usage: UsageMeter | None = None,
) -> None:
    job = lock_held(conn, lease)
    rules.check_place(lease, job.next_row, from_row)
    values = {"ingest_done": True, "rows_total": rows_total, "report": {**job.report, **models}}
    said = entries.read(rows_total, models)
    values |= audit_log.link(conn, now, job, EntryKind.READ, said, lease.owner)
    move(conn, now, lease.job_id, Stage.RUN, **values)
    move_if_done(conn, now, lease.job_id)
    sql_usage.keep(conn, lease, usage)


def pause_ingest(
    conn: Connection, now: Now, lease: Lease, most_open: int, usage: UsageMeter | None = None
) -> int:
    """How many groups may be added before the next call; 0: the lease was given back."""
    job = lock_held(conn, lease)
    is_open = (Group.job_id == lease.job_id, group_is_open())
    room: int = most_open - conn.scalars(select(func.count()).where(*is_open)).one()
    if room > 0 or job.cancel_requested:
        return max(room, 1)
    resumes_at = rules.resumes_at(most_open)
    move(conn, now, lease.job_id, lease.stage, ingest_resumes_at=resumes_at)
    sql_usage.keep(conn, lease, usage)
    return 0


def pin_models(conn: Connection, now: Now, lease: Lease, models: Models) -> None:
    job = lock_held(conn, lease)
    pinned = rules.models_to_pin(mapper.job_row(job), models)
    if pinned:
        head = audit_log.link(conn, now, job, EntryKind.PINNED, pinned, lease.owner)
        conn.execute(update(Job).where(Job.job_id == lease.job_id).values(**pinned, **head))


def note_report(conn: Connection, now: Now, lease: Lease, values: Mapping[str, Any]) -> None:
    job = lock_held(conn, lease)
    if lineage.INPUT in values:  # the job's start can be told now
        notifications.add_start(conn, now, lease.job_id)
    report = {**job.report, **values}
    conn.execute(update(Job).where(Job.job_id == lease.job_id).values(report=report))


def finish(
    conn: Connection,
    now: Now,
    lease: Lease,
    state: JobState,
    error: str | None = None,
    manifest: PublishedManifest | None = None,
    usage: UsageMeter | None = None,
) -> None:
    rules.check_final(state)
    job, error = lock_held(conn, lease), error and masked(error)
    if lease.stage is not Stage.PUBLISH:
        raise rules.fenced(lease)
    sql_usage.keep(conn, lease, usage)  # before the accounts are pinned
    _end_with_accounts(conn, now, job, state, error, manifest, lease.owner)


def give_up(
    conn: Connection, now: Now, job_id: str, state: JobState, error: str | None = None
) -> bool:
    rules.check_final(state)
    job = lock(conn, find(conn, job_id).job_id)
    if JobState(job.state).is_final:
        return False
    _end_with_accounts(conn, now, job, state, error and masked(error))
    return True


def _end_with_accounts(
    conn: Connection,
    now: Now,
    job: Any,
    state: JobState,
    error: str | None,
    manifest: PublishedManifest | None = None,
    actor: str | None = None,
) -> None:
    pinned = accounts.pinned(audit_log.accounts(conn, job.job_id))
    said = entries.ended(state.value, error, manifest, pinned)
    head = audit_log.link(conn, now, job, EntryKind.PUBLISHED, said, actor)
    _end(conn, now, job, state, error, head)


def note_action(
    conn: Connection, now: Now, job_id: str, kind: EntryKind, payload: Mapping[str, Any]
) -> Head:
    """Say in a job's log what was done with it, and change nothing else."""
    job = lock(conn, find(conn, job_id).job_id)
    head = audit_log.link(conn, now, job, kind, payload)
    conn.execute(update(Job).where(Job.job_id == job.job_id).values(**head))
    return Head(head["log_number"], head["log_head"])
