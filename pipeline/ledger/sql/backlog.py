"""What waits and who works, in SQL: some statements over what is open, by its indexes."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, case, func, or_, select

from specbatch.pipeline.ledger.sql import presence
from specbatch.pipeline.ledger.sql.serving import PINNED_COLUMNS
from specbatch.pipeline.ledger.sql.transactions import Now
from specbatch.schemas import time_mapper
from specbatch.schemas.backlog import WORK, Backlog, PinnedJob, StageBacklog
from specbatch.schemas.records import JobState, Stage
from specbatch.schemas.tables import Group, Job, group_is_open, job_is_due, job_is_live
from specbatch.schemas.time_tables import WorkerSession

_NOT_OVER = (JobState.QUEUED, JobState.RUNNING)


def backlog(conn: Connection, now: Now) -> Backlog:
    at = float(conn.execute(select(now)).scalar_one())
    units = [
        *conn.execute(_units(Group, now, group_is_open())),
        *conn.execute(_units(Job, now, job_is_due(), Job.ingest_resumes_at.is_(None))),
    ]
    stages = {Stage(row.stage): _stage(row, at) for row in units}
    states = {
        JobState(row.state): row
        for row in conn.execute(
            select(
                Job.state,
                func.count().label("jobs"),
                func.coalesce(func.sum(Job.rows_rejected), 0).label("rejected"),
            )
            .where(_is_not_over())
            .group_by(Job.state)
        )
    }
    failed = case((Group.stage == Stage.FAILED.value, Group.rows), else_=Group.rows_failed)
    in_groups = conn.execute(
        select(func.coalesce(func.sum(failed), 0))
        .join(Job, Job.job_id == Group.job_id)
        .where(_is_not_over())
    ).scalar_one()
    return Backlog(
        at=at,
        stages=tuple(stages.get(stage, StageBacklog(stage)) for stage in WORK),
        jobs={state: states[state].jobs if state in states else 0 for state in _NOT_OVER},
        rows_failed=int(in_groups) + sum(int(row.rejected) for row in states.values()),
        workers=tuple(time_mapper.worker_now(row, at) for row in conn.execute(_workers(now))),
        pinned=tuple(_pinned(conn)),
        processes=tuple(presence.processes(conn, at)),
    )


def _pinned(conn: Connection) -> list[PinnedJob]:
    """Live jobs by id, each with the stages at which it has something to be done."""
    stages: dict[str, set[Stage]] = {}
    at_work = select(Group.job_id, Group.stage).where(group_is_open()).distinct()
    for row in conn.execute(at_work):
        stages.setdefault(row.job_id, set()).add(Stage(row.stage))
    wanted = (Job.job_id, Job.stage, Job.verifier, Job.proposer, Job.spec, Job.model_parts)
    jobs = conn.execute(
        select(*wanted, Job.ingest_resumes_at, *PINNED_COLUMNS)
        .where(_is_not_over(), ~Job.cancel_requested)
        .order_by(Job.job_id)
    )
    found = []
    for job in jobs:
        of_groups = stages.get(job.job_id, set())
        if Stage(job.stage) in (Stage.INGEST, Stage.PUBLISH) and job.ingest_resumes_at is None:
            of_groups.add(Stage(job.stage))
        found.append(PinnedJob.of(job, of_groups))
    return found


def _is_not_over() -> ColumnElement[bool]:
    """By the indexes: jobs of the past may be many."""
    return or_(job_is_due(), job_is_live())


def _units(table: type[Group] | type[Job], now: Now, *which: ColumnElement[bool]) -> Any:
    ready = table.lease_until <= now
    since = case((table.lease_until > table.ready_at, table.lease_until), else_=table.ready_at)
    return (
        select(
            table.stage,
            func.sum(case((ready, 1), else_=0)).label("ready"),
            func.sum(case((ready, 0), else_=1)).label("leased"),
            func.sum(case((ready & (table.lease_until > 0), 1), else_=0)).label("expired"),
            func.min(case((ready, since))).label("oldest"),
        )
        .where(*which)
        .group_by(table.stage)
    )


def _stage(row: Any, at: float) -> StageBacklog:
    waited = None if row.oldest is None else max(0.0, at - row.oldest)
    return StageBacklog(Stage(row.stage), int(row.ready), int(row.leased), int(row.expired), waited)


def _workers(now: Now) -> Any:
    held = (
        select(Group.lease_owner, func.count().label("leases"))
        .where(group_is_open(), Group.lease_until > now)
        .group_by(Group.lease_owner)
        .subquery()
    )
    return (
        select(*WorkerSession.__table__.c, func.coalesce(held.c.leases, 0).label("leases"))
        .outerjoin(held, held.c.lease_owner == WorkerSession.owner)
        .where(WorkerSession.ended_at.is_(None))
        .order_by(WorkerSession.owner, WorkerSession.session_id)
    )
