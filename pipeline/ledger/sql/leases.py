"""Claims and releases. A claim is one UPDATE, so exactly one of many claimers wins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Executable,
    bindparam,
    case,
    func,
    select,
    update,
)

from specbatch.pipeline.audit import entries
from specbatch.pipeline.ledger import cut_rules, rules
from specbatch.pipeline.ledger.sql import chain, cutting, jobs, serving
from specbatch.pipeline.ledger.sql.cutting import is_held
from specbatch.pipeline.ledger.sql.jobs import FREE
from specbatch.pipeline.ledger.sql.transactions import Now
from specbatch.schemas import mapper
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.records import GroupWork, JobState, JobWork, Lease, Released, Stage
from specbatch.schemas.tables import JOB_WORK, Group, Job, group_is_open

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
        allowed += [~Job.cancel_requested, Job.ingest_resumes_at.is_(None)]
        started_at = func.coalesce(Job.started_at, now)
        values = {"state": JobState.RUNNING.value, "started_at": started_at}
    row = conn.execute(
        update(Job)
        .where(Job.job_id == job_id, *is_free(Job, stage, now), *allowed)
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
    serves: Serves | None = None,
) -> GroupWork | None:
    """`serves`: what the worker verifies with; None: its groups are not told apart by that.

    Raises `UnpinnedError` and `MovedError`.
    """
    if stage not in rules.OPEN:
        return None
    claim = _claim(now, stage, owner, lease_sec, max_attempts, serves)
    work = taken(conn, claim, max_attempts, {"of_job": job_id, "of_index": index})
    if work is None and _close_group(conn, now, job_id, index, stage, max_attempts):
        # The first half has an attempt left. Its second half is due: the sweeper enqueues it.
        return claim_group(conn, now, job_id, index, stage, owner, lease_sec, max_attempts, serves)
    return work if work is None or serves is None else _of_class(conn, work, serves)


@lru_cache(maxsize=16)
def _claim(
    now: Now,
    stage: Stage,
    owner: str,
    lease_sec: float,
    max_attempts: int,
    serves: Serves | None,
) -> Executable:
    """The claim of group `of_index` of job `of_job`. Kept: to build it takes longer than to send it
    (where the time is the server's, which is one and the same expression)."""
    job: BindParameter[str] = bindparam("of_job")
    index: BindParameter[int] = bindparam("of_index")
    allowed = [Group.attempts < max_attempts, *serving.job_is_served(job, serves)]
    if stage in rules.CANCELLABLE:
        cancelled = select(Job.cancel_requested).where(Job.job_id == job).scalar_subquery()
        allowed.append(~cancelled)
    if stage in cut_rules.CUT_AT:
        allowed.append(cutting.one_suspect_at_a_time(now, stage, owner, max_attempts))
    free = (Group.job_id == job, Group.group_index == index, *is_free(Group, stage, now))
    return taking(now, owner, lease_sec, *free, *allowed)


def taking(now: Now, owner: str, lease_sec: float, *which: ColumnElement[bool]) -> Executable:
    """The statement that claims the one group that all of this is true of, for `taken`."""
    return (
        update(Group)
        .where(*which)
        .values(
            waited_sec=now - _later(Group.ready_at, Group.lease_until),
            cut_wanted=False,
            in_flight_usd=0.0,
            **_claimed(Group, owner, now, lease_sec),
        )
        .returning(*Group.__table__.c)
    )


def taken(
    conn: Connection,
    claim: Executable,
    max_attempts: int,
    parameters: Mapping[str, Any],
) -> GroupWork | None:
    """Claim a group; None when there is none to be had."""
    row = conn.execute(claim, parameters).first()
    if row is None:
        return None
    # Told here and not by RETURNING, where SQLite 3.40 takes `IS NOT NULL` to be true.
    failed_part = row.row_stop is not None and row.last_error is not None
    suspect = cut_rules.is_suspect(row.attempts - 1, row.rows, failed_part, max_attempts)
    return replace(mapper.group_work(row), suspect=suspect)


def _of_class(conn: Connection, work: GroupWork, serves: Serves) -> GroupWork:
    """The claimed group with what its job has pinned. Raises `UnpinnedError` and `MovedError`."""
    pinned = serving.pinned(conn, work.lease.job_id)
    serving.check(serves, work.lease.job_id, pinned)
    return replace(work, **pinned._asdict())


def close_group(
    conn: Connection, now: Now, job_id: str, index: int, stage: Stage, max_attempts: int
) -> None:
    """Send on, or cut, a free group that nobody may claim any more, if it still is one."""
    _close_group(conn, now, job_id, index, stage, max_attempts)


def is_free(table: type[Job] | type[Group], stage: Stage, now: Now) -> list[ColumnElement[bool]]:
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
    free = (Job.job_id == job_id, *is_free(Job, stage, now))
    if conn.scalar(select(Job.job_id).where(*free)) is None:
        return  # somebody else has it, or it is elsewhere: the usual end of a race
    job = jobs.lock(conn, job_id)
    row = conn.execute(select(*Job.__table__.c).where(*free)).first()
    if row is None:
        return
    if row.cancel_requested and stage is Stage.INGEST:
        jobs.leave_ingest(conn, now, job_id)
    elif row.attempts >= max_attempts:
        error = rules.last_words(Stage.FAILED, row.attempts, row.last_error)
        jobs.end_unpublished(conn, now, job, error)


def _close_group(
    conn: Connection, now: Now, job_id: str, index: int, stage: Stage, max_attempts: int
) -> bool:
    """Send on a free group whose attempts are used up or whose job is cancelled.

    True: it was cut in halves instead, and stays where it is.
    """
    free = (_is_group(job_id, index), *is_free(Group, stage, now))
    if conn.scalar(select(Group.group_index).where(*free)) is None:
        return False
    job = jobs.lock(conn, job_id)
    row = conn.execute(select(*Group.__table__.c).where(*free).with_for_update()).first()
    if row is None:
        return False
    to = rules.stage_without_lease(stage, row.attempts, max_attempts, job.cancel_requested)
    if to is stage:
        return False
    error = rules.last_words(to, row.attempts, row.last_error)
    if _ends_in_halves(job, row, to):
        cutting.in_halves(conn, now, job, row, max_attempts, error or "")
        return True
    conn.execute(
        update(Group).where(_is_group(job_id, index)).values(**sent_on(to, now), last_error=error)
    )
    jobs.settle(conn, now, job_id, **_said_if_lost(conn, now, job, row, to, error))
    return False


def _said_if_lost(
    conn: Connection,
    now: Now,
    job: Any,
    row: Any,
    to: Stage,
    error: str | None,
    actor: str | None = None,
) -> dict[str, Any]:
    """What the job's row is updated with, once its log tells of a group that failed for good."""
    if to is not Stage.FAILED:
        return {}
    said = entries.lost(row.group_index, row.rows, error)
    return chain.link(conn, now, job, EntryKind.LOST, said, actor)


def _ends_in_halves(job: Any, row: Any, to: Stage, whole: bool = False) -> bool:
    return cut_rules.ends_in_halves(
        Stage(row.stage),
        to,
        row.rows,
        cancelled=job.cancel_requested,
        whole=whole or row.rows_kept > 0,  # which half they are in is not known here
        groups_cut=job.groups_cut,
    )


def sent_on(to: Stage, now: Now) -> dict[str, Any]:
    """A group that nobody holds at another stage: ready now, with all attempts again.

    Its times stay as they are: nobody claimed it, so nobody waited for its claim.
    """
    return {"stage": to.value, "ready_at": now, "attempts": 0, **FREE}


# --- whose they are -------------------------------------------------------------------------


def _held_of(job_id: str, now: Now) -> list[tuple[type[Job] | type[Group], list[Any]]]:
    """The job's row and those of its groups that somebody holds, of each table."""
    groups = [Group.job_id == job_id, group_is_open(), Group.lease_until > now]
    return [(Job, [Job.job_id == job_id, Job.lease_until > now]), (Group, groups)]


def holders(conn: Connection, now: Now, job_id: str) -> list[str]:
    found: set[str] = set()
    for table, held in _held_of(job_id, now):
        found |= set(conn.scalars(select(table.lease_owner).where(*held).distinct()))
    return sorted(found)


def expire(conn: Connection, now: Now, job_id: str, owner: str) -> int:
    """The job's row first, as everybody locks them."""
    return sum(
        conn.execute(
            update(table).where(*held, table.lease_owner == owner).values(lease_until=now)
        ).rowcount
        for table, held in _held_of(job_id, now)
    )


# --- releases -------------------------------------------------------------------------------


def release(
    conn: Connection,
    now: Now,
    lease: Lease,
    error: str,
    forgiven: bool,
    whole: bool,
    max_attempts: int,
) -> Released:
    """Ready again, or closed or cut by the rules; nothing when the lease is lost."""
    job = jobs.lock(conn, lease.job_id)
    if job is None:
        return Released(False)
    if lease.group_index is not None:
        return _release_group(conn, now, job, lease, error, forgiven, whole, max_attempts)
    return _release_job(conn, now, job, lease, error, forgiven, max_attempts)


def _release_job(
    conn: Connection,
    now: Now,
    job: Any,
    lease: Lease,
    error: str,
    forgiven: bool,
    max_attempts: int,
) -> Released:
    held = (lease.generation, lease.owner, lease.stage.value)
    if (job.generation, job.lease_owner, job.stage) != held:
        return Released(False)
    if job.cancel_requested and lease.stage is Stage.INGEST:
        jobs.leave_ingest(conn, now, lease.job_id)
    elif job.attempts - forgiven >= max_attempts:
        jobs.end_unpublished(conn, now, job, error, lease.owner)
    else:
        again = {"attempts": job.attempts - forgiven, "last_error": error}
        jobs.move(conn, now, lease.job_id, lease.stage, **again)
    return Released(True)


def _release_group(
    conn: Connection,
    now: Now,
    job: Any,
    lease: Lease,
    error: str,
    forgiven: bool,
    whole: bool,
    max_attempts: int,
) -> Released:
    held = select(*Group.__table__.c).where(*is_held(lease)).with_for_update()
    row = conn.execute(held).first()
    if row is None:
        return Released(False)
    spent = row.attempts - forgiven
    to = rules.stage_without_lease(lease.stage, spent, max_attempts, job.cancel_requested)
    if _ends_in_halves(job, row, to, whole):
        return Released(True, cutting.in_halves(conn, now, job, row, max_attempts, error))
    attempts = spent if to is lease.stage else 0
    conn.execute(
        update(Group)
        .where(*is_held(lease))
        .values(stage=to.value, ready_at=now, attempts=attempts, last_error=error, **FREE)
    )
    head = _said_if_lost(conn, now, job, row, to, error, lease.owner)
    jobs.settle(conn, now, lease.job_id, **head)
    return Released(True)
