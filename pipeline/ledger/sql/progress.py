"""Counts of a job, from its row and its groups' totals: completions are never scanned.

A group is *finished* when it is DONE or FAILED. Rows of a FAILED group count as done and as failed;
rows of a CANCELLED one as neither, but for those that were finished when it was stopped.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Double, case, cast, func, select

from specbatch.pipeline.ledger.sql import jobs
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.records import (
    JobState,
    Stage,
)
from specbatch.schemas.tables import Group

_FINISHED = Group.stage.in_([Stage.DONE.value, Stage.FAILED.value])
_FAILED = Group.stage == Stage.FAILED.value
_CANCELLED = Group.stage == Stage.CANCELLED.value


def _total(value: Any) -> Any:
    return func.coalesce(func.sum(value), 0)


_TOTALS = {
    "rows_finished": _total(case((_FINISHED, Group.rows), (_CANCELLED, Group.rows_kept), else_=0)),
    "rows_failed": _total(case((_FAILED, Group.rows), else_=Group.rows_failed)),
    "groups_done": _total(case((_FINISHED, 1), else_=0)),
    **{
        name: _total(getattr(Group, name))
        for name in (
            "completions",
            "completion_tokens",
            "proposed",
            "accepted",
            "verifier_passes",
        )
    },
    **{
        name: cast(_total(getattr(Group, name)), Double)
        for name in ("queue_sec", "compute_sec", "cost_usd")
    },
}


def progress(conn: Connection, job_id: str) -> JobProgress:
    """Two statements, whatever the size of the job."""
    job = jobs.find(conn, job_id)
    columns = [value.label(name) for name, value in _TOTALS.items()]
    totals = conn.execute(select(*columns).where(Group.job_id == job.job_id)).one()
    return JobProgress(
        job_id=job.job_id,
        state=JobState(job.state),
        rows_total=job.rows_total if job.ingest_done else job.next_row,
        rows_done=int(totals.rows_finished) + job.rows_rejected,
        rows_failed=int(totals.rows_failed) + job.rows_rejected,
        groups_total=job.groups_total + job.groups_cut,
        groups_done=int(totals.groups_done),
        completions=int(totals.completions),
        prompt_tokens=job.prompt_tokens,
        completion_tokens=int(totals.completion_tokens),
        proposed=int(totals.proposed),
        accepted=int(totals.accepted),
        verifier_passes=int(totals.verifier_passes),
        queue_sec=totals.queue_sec,
        compute_sec=totals.compute_sec,
        cost_usd=totals.cost_usd,
        ingest_done=job.ingest_done,
    )
