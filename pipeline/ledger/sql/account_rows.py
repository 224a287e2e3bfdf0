"""Reads what `accounts.py` pins and compares, in one transaction that the caller opened."""

from __future__ import annotations

from sqlalchemy import Connection, false, select

from specbatch.pipeline.audit.accounts import OF_GROUP, OF_JOB, AccountRows
from specbatch.pipeline.ledger.sql import time_ledger
from specbatch.schemas import mapper, time_mapper
from specbatch.schemas.tables import Decision, Group, Job
from specbatch.schemas.time_tables import TimeSlice, WorkerSession


def read(conn: Connection, job_id: str) -> AccountRows:
    job = conn.execute(
        select(*(getattr(Job, name) for name in OF_JOB)).where(Job.job_id == job_id)
    ).one()
    groups = conn.execute(
        select(Group.group_index, *(getattr(Group, name) for name in OF_GROUP))
        .where(Group.job_id == job_id)
        .order_by(Group.group_index)
    )
    device = [getattr(WorkerSession, name) for name in time_mapper.DEVICE]
    slices = conn.execute(
        select(*TimeSlice.__table__.c, *device, false().label("in_flight"))
        .join(WorkerSession, WorkerSession.session_id == TimeSlice.session_id)
        .where(TimeSlice.job_id == job_id)
        .order_by(TimeSlice.group_index, TimeSlice.generation, TimeSlice.session_id)
    )
    decisions = conn.execute(
        select(*Decision.__table__.c).where(Decision.job_id == job_id).order_by(Decision.id)
    )
    return AccountRows(
        job=dict(job._mapping),
        groups=[tuple(row) for row in groups],
        slices=[time_mapper.time_slice(row) for row in slices],
        sessions=time_ledger.sessions(conn, job_id, None),
        decisions=[(row.id, mapper.decision(row)) for row in decisions],
    )
