"""Claims, heartbeats and releases. A claim is one UPDATE, so exactly one of many claimers wins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, case, func, select, tuple_, update

from specbatch.pipeline.ledger import jobs, rules
from specbatch.pipeline.ledger.jobs import FREE
from specbatch.pipeline.ledger.transactions import Now
from specbatch.schemas import mapper
from specbatch.schemas.records import Bell, GroupWork, JobState, JobWork, Lease, Stage
from specbatch.schemas.tables import JOB_WORK, Group, Job, group_is_open, job_is_due

_LEASES_PER_STATEMENT = 500


# --- claims ---------------------------------------------------------------------------------


def claim_job(
    conn: Connection,
    now: Now,
    job_id: str,
    stage: Stage,
    owner: str,
    lease_sec: float,
    max_attempts: int,
) -> JobWork | None:
    if stage.value not in JOB_WORK:
        return None
    values: dict[str, Any] = {}
    allowed = [Job.attempts < max_attempts]
    if stage is Stage.INGEST:
        allowed.append(~Job.cancel_requested)
        started_at = func.coalesce(Job.started_at, now)
        values = {"state": JobState.RUNNING.value, "started_at": started_at}
    row = conn.execute(
        update(Job)
        .where(Job.job_id == job_id, *_is_free(Job, stage, now), *allowed)
        .values(**_claimed(Job, owner, now, lease_sec), **values)
        .returning(*Job.__table__.c)
    ).first()
    if row is None:
        _close_job(conn, now, job_id, stage, max_attempts)
        return None
    return mapper.job_work(row)


def claim_group(
    conn: Connection,
    now: Now,
    job_id: str,
    index: int,
    stage: Stage,
    owner: str,
    lease_sec: float,
    max_attempts: int,
) -> GroupWork | None:
    if stage not in rules.OPEN:
        return None
    allowed = [Group.attempts < max_attempts]
    if stage in rules.CANCELLABLE:
        cancelled = select(Job.cancel_requested).where(Job.job_id == job_id).scalar_subquery()
        allowed.append(~cancelled)
    row = conn.execute(
        update(Group)
        .where(_is_group(job_id, index), *_is_free(Group, stage, now), *allowed)
        .values(
            waited_sec=now - _later(Group.ready_at, Group.lease_until),
            **_claimed(Group, owner, now, lease_sec),
        )
        .returning(*Group.__table__.c)
    ).first()
    if row is None:
        _close_group(conn, now, job_id, index, stage, max_attempts)
        return None
    return mapper.group_work(row)


def _is_free(table: type[Job] | type[Group], stage: Stage, now: Now) -> list[ColumnElement[bool]]:
    return [table.stage == stage.value, table.lease_until <= now]


def _claimed(
    table: type[Job] | type[Group], owner: str, now: Now, lease_sec: float
) -> dict[str, Any]:
    return {
        "generation": table.generation + 1,
        "attempts": table.attempts + 1,
        "lease_owner": owner,
        "lease_until": now + lease_sec,
    }


def _later(one: Any, other: Any) -> ColumnElement[float]:
    return case((other > one, other), else_=one)


def _is_group(job_id: str, index: int) -> ColumnElement[bool]:
    return (Group.job_id == job_id) & (Group.group_index == index)


def _close_job(conn: Connection, now: Now, job_id: str, stage: Stage, max_attempts: int) -> None:
    """End, or take out of ingest, a free job that could not be claimed for want of permission."""
    free = (Job.job_id == job_id, *_is_free(Job, stage, now))
    if conn.scalar(select(Job.job_id).where(*free)) is None:
        return  # somebody else has it, or it is elsewhere: the usual end of a race
    jobs.lock(conn, job_id)
    row = conn.execute(select(*Job.__table__.c).where(*free)).first()
    if row is None:
        return
    if row.cancel_requested and stage is Stage.INGEST:
        jobs.leave_ingest(conn, now, job_id)
    elif row.attempts >= max_attempts:
        error = rules.last_words(Stage.FAILED, row.attempts, row.last_error)
        jobs.end(conn, now, job_id, JobState.FAILED, error)


def _close_group(
    conn: Connection, now: Now, job_id: str, index: int, stage: Stage, max_attempts: int
) -> None:
    """Send on a free group whose attempts are used up or whose job is cancelled."""
    free = (_is_group(job_id, index), *_is_free(Group, stage, now))
    if conn.scalar(select(Group.group_index).where(*free)) is None:
        return
    job = jobs.lock(conn, job_id)
    row = conn.execute(select(*Group.__table__.c).where(*free).with_for_update()).first()
    if row is None:
        return
    to = rules.stage_without_lease(stage, row.attempts, max_attempts, job.cancel_requested)
    if to is stage:
        return
    error = rules.last_words(to, row.attempts, row.last_error)
    conn.execute(
        update(Group)
        .where(_is_group(job_id, index))
        .values(stage=to.value, ready_at=now, attempts=0, last_error=error, **FREE)
    )
    jobs.settle(conn, now, job_id)


# --- heartbeats -----------------------------------------------------------------------------


def heartbeat(
    conn: Connection, now: Now, leases: Sequence[Lease], lease_sec: float
) -> tuple[set[Lease], set[str]]:
    """(leases no longer held, ids of jobs with the cancel flag)."""
    lost = set(leases)
    for start in range(0, len(leases), _LEASES_PER_STATEMENT):
        part = leases[start : start + _LEASES_PER_STATEMENT]
        lost -= _extend_groups(conn, now, [x for x in part if x.group_index is not None], lease_sec)
        lost -= _extend_jobs(conn, now, [x for x in part if x.group_index is None], lease_sec)
    job_ids = {lease.job_id for lease in leases}
    cancelled = conn.scalars(
        select(Job.job_id).where(Job.job_id.in_(job_ids), Job.cancel_requested)
    )
    return lost, set(cancelled)


def _extend_groups(
    conn: Connection, now: Now, leases: Sequence[Lease], lease_sec: float
) -> set[Lease]:
    key = (
        Group.job_id,
        Group.group_index,
        Group.generation,
        Group.lease_owner,
        Group.stage,
    )
    wanted = {(x.job_id, x.group_index, x.generation, x.owner, x.stage.value): x for x in leases}
    return _extend(conn, Group, key, wanted, now, lease_sec)


def _extend_jobs(
    conn: Connection, now: Now, leases: Sequence[Lease], lease_sec: float
) -> set[Lease]:
    key = (Job.job_id, Job.generation, Job.lease_owner, Job.stage)
    wanted = {(x.job_id, x.generation, x.owner, x.stage.value): x for x in leases}
    return _extend(conn, Job, key, wanted, now, lease_sec)


def _extend(
    conn: Connection,
    table: type[Job] | type[Group],
    key: tuple[Any, ...],
    wanted: dict[Any, Lease],
    now: Now,
    lease_sec: float,
) -> set[Lease]:
    """The leases among `wanted` that are current; their time is extended."""
    if not wanted:
        return set()
    rows = conn.execute(
        update(table)
        .where(tuple_(*key).in_(list(wanted)))
        .values(lease_until=now + lease_sec)
        .returning(*key)
    )
    # `attempt` is no part of the key, for add_groups resets it under a current lease.
    return {wanted[tuple(row)] for row in rows}


# --- releases -------------------------------------------------------------------------------


def release(
    conn: Connection, now: Now, lease: Lease, error: str, forgiven: bool, max_attempts: int
) -> None:
    """Ready again, or closed by the rules; nothing when the lease is lost."""
    job = jobs.lock(conn, lease.job_id)
    if job is None:
        return
    if lease.group_index is None:
        _release_job(conn, now, job, lease, error, forgiven, max_attempts)
    else:
        _release_group(conn, now, job, lease, error, forgiven, max_attempts)


def _release_job(
    conn: Connection,
    now: Now,
    job: Any,
    lease: Lease,
    error: str,
    forgiven: bool,
    max_attempts: int,
) -> None:
    held = (lease.generation, lease.owner, lease.stage.value)
    if (job.generation, job.lease_owner, job.stage) != held:
        return
    if job.cancel_requested and lease.stage is Stage.INGEST:
        jobs.leave_ingest(conn, now, lease.job_id)
    elif job.attempts - forgiven >= max_attempts:
        jobs.end(conn, now, lease.job_id, JobState.FAILED, error)
    else:
        again = {"attempts": job.attempts - forgiven, "last_error": error}
        jobs.move(conn, now, lease.job_id, lease.stage, **again)


def _release_group(
    conn: Connection,
    now: Now,
    job: Any,
    lease: Lease,
    error: str,
    forgiven: bool,
    max_attempts: int,
) -> None:
    row = conn.execute(select(Group.attempts).where(*is_held(lease)).with_for_update()).first()
    if row is None:
        return
    spent = row.attempts - forgiven
    to = rules.stage_without_lease(lease.stage, spent, max_attempts, job.cancel_requested)
    attempts = spent if to is lease.stage else 0
    conn.execute(
        update(Group)
        .where(*is_held(lease))
        .values(stage=to.value, ready_at=now, attempts=attempts, last_error=error, **FREE)
    )
    jobs.settle(conn, now, lease.job_id)


def is_held(lease: Lease) -> list[ColumnElement[bool]]:
    """What is true of the leased group's row as long as the lease is current."""
    return [
        Group.job_id == lease.job_id,
        Group.group_index == lease.group_index,
        Group.generation == lease.generation,
        Group.lease_owner == lease.owner,
        Group.stage == lease.stage.value,
    ]


# --- the sweeper's list ---------------------------------------------------------------------


def due(conn: Connection, now: Now, limit: int) -> list[Bell]:
    """Jobs first, then groups; of each kind the longest ready first."""
    job_rows = conn.execute(
        select(Job.job_id, Job.stage)
        .where(job_is_due(), Job.lease_until <= now)
        .order_by(Job.ready_at, Job.job_id)
        .limit(limit)
    ).all()
    group_rows = conn.execute(
        select(Group.job_id, Group.group_index, Group.stage, Job.verifier, Job.proposer)
        .join(Job, Job.job_id == Group.job_id)
        .where(group_is_open(), Group.lease_until <= now)
        .order_by(Group.ready_at, Group.job_id, Group.group_index)
        .limit(limit - len(job_rows))
    ).all()
    return [*map(mapper.job_bell, job_rows), *map(mapper.group_bell, group_rows)]
