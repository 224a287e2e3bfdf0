"""What placement by price decides by: workers that are alive, and jobs with groups to verify."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, case, func, select

from specbatch.pipeline.ledger.sql import figures
from specbatch.pipeline.ledger.sql.pinning import PINNED_COLUMNS
from specbatch.pipeline.ledger.sql.transactions import Now
from specbatch.schemas import time_mapper
from specbatch.schemas.backlog import Alive, OpenJob, PinnedJob
from specbatch.schemas.records import JobState, Stage
from specbatch.schemas.tables import Group, Job, group_is_open, job_is_live

_AHEAD = Group.stage.in_([Stage.PROPOSE.value, Stage.VERIFY.value])
_BEHIND = Group.stage.in_([Stage.RECORD.value, Stage.DONE.value])


def alive(conn: Connection, now: Now, silence_sec: float) -> Alive:
    """Workers and processes with a heartbeat since then."""
    at = float(conn.execute(select(now)).scalar_one())
    workers = [time_mapper.worker_now(row, at) for row in conn.execute(figures.workers(now))]
    return Alive(
        tuple(one for one in workers if one.silent_sec <= silence_sec),
        tuple(one for one in figures.processes(conn, at) if one.silent_sec <= silence_sec),
        at,
    )


def open_jobs(conn: Connection) -> list[OpenJob]:
    """Live jobs that are not cancelled, by id."""
    wanted = (Job.job_id, Job.verifier, Job.proposer, Job.spec, Job.model_parts, Job.tenant)
    about = (Job.priority, Job.created_at, Job.deadline_at, Job.name, Job.ingest_done)
    sums = {
        "rows": func.sum(case((_AHEAD, Group.rows), else_=0)),
        "rows_done": func.sum(case((_BEHIND, Group.rows), else_=0)),
        "sec_done": func.sum(case((_BEHIND, Group.compute_sec), else_=0.0)),
        "group_rows": func.max(case((_AHEAD, Group.rows), else_=0)),
        "moved_at": func.max(Group.ready_at),
    }
    # Live ones come first: past jobs and their groups may be many. A job's columns have no sum of
    # its seconds, so its finished groups are read, too.
    open_groups = select(Group.job_id).where(Group.job_id == Job.job_id, group_is_open(), _AHEAD)
    live = select(Job.job_id).where(job_is_live(), ~Job.cancel_requested, open_groups.exists())
    of_groups = (
        select(Group.job_id, *(value.label(name) for name, value in sums.items()))
        .where(Group.job_id.in_(live))
        .group_by(Group.job_id)
        .subquery()
    )
    rows = conn.execute(
        select(*wanted, *about, *PINNED_COLUMNS, *(of_groups.c[name] for name in sums))
        .join(of_groups, of_groups.c.job_id == Job.job_id)
        .order_by(Job.job_id)
    ).all()
    return [_open_job(conn, row) for row in rows]


def _open_job(conn: Connection, row: Any) -> OpenJob:
    per_row = row.sec_done / int(row.rows_done) if row.rows_done and row.sec_done else None
    if per_row is None and row.deadline_at is not None:
        per_row = _usual_sec_per_row(conn, row)
    return OpenJob(
        pinned=PinnedJob.of(row, {Stage.VERIFY}),
        tenant=row.tenant,
        priority=row.priority,
        created_at=row.created_at,
        deadline_at=row.deadline_at,
        rows=int(row.rows),
        is_read=row.ingest_done,
        sec_per_row=per_row,
        group_rows=int(row.group_rows),
        moved_at=row.moved_at,
    )


def _usual_sec_per_row(conn: Connection, job: Any) -> float | None:
    """Device seconds per row of the newest finished job of the same name and verifier."""
    same = (Job.tenant == job.tenant, Job.name == job.name, Job.verifier == job.verifier)
    newest = (
        select(Job.job_id)
        .where(*same, Job.state == JobState.DONE.value)
        .order_by(Job.created_at.desc())
        .limit(1)
        .scalar_subquery()
    )
    sums = select(func.sum(Group.compute_sec).label("sec"), func.sum(Group.rows).label("rows"))
    found = conn.execute(sums.where(Group.job_id == newest)).one()
    return found.sec / int(found.rows) if found.sec and found.rows else None
