"""What a sweeper asks for: the units that are due, and the groups that wait for drafts in vain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    case,
    exists,
    func,
    select,
    true,
    tuple_,
    update,
)
from sqlalchemy.orm import aliased

from specbatch.pipeline.ledger.sql.leases import is_free, sent_on
from specbatch.pipeline.ledger.sql.transactions import Now
from specbatch.schemas import mapper
from specbatch.schemas.records import DueWork, Stage
from specbatch.schemas.tables import Group, Job, group_is_open, job_is_due


def due(conn: Connection, now: Now, limit: int, job_id: str | None) -> list[DueWork]:
    """Jobs first, then groups; the longest ready first, and `limit` of each kind."""
    age = (Job.ready_at, Job.job_id)
    jobs = _oldest_of_each_kind(
        select(Job.job_id, Job.stage, Job.priority)
        .where(job_is_due(), Job.lease_until <= now, Job.ingest_resumes_at.is_(None))
        .where(true() if job_id is None else Job.job_id == job_id),
        age,
        (Job.stage, Job.priority),
        limit,
    )
    model = case((Group.stage == Stage.PROPOSE.value, Job.proposer), else_=Job.verifier)
    groups = _oldest_of_each_kind(
        select(
            Group.job_id, Group.group_index, Group.stage, Job.verifier, Job.proposer, Job.priority
        )
        .join(Job, Job.job_id == Group.job_id)
        .where(group_is_open(), Group.lease_until <= now)
        .where(true() if job_id is None else Group.job_id == job_id),
        (Group.ready_at, Group.job_id, Group.group_index),
        (Group.stage, model, Job.priority),
        limit,
    )
    job_rows, group_rows = conn.execute(jobs).all(), conn.execute(groups).all()
    return [*map(mapper.due_job, job_rows), *map(mapper.due_group, group_rows)]


def _oldest_of_each_kind(
    units: Select[*tuple[Any, ...]], age: Sequence[Any], kind: Sequence[Any], limit: int
) -> Select[*tuple[Any, ...]]:
    """Else what waits for a model that nobody serves would hide all that came after it."""
    place = func.row_number().over(partition_by=kind, order_by=age).label("place")
    total = func.row_number().over(order_by=age).label("age")
    found = units.add_columns(place, total).subquery()
    return select(found).where(found.c.place <= limit).order_by(found.c.age)


def skip_proposals(conn: Connection, now: Now, patience_sec: float) -> list[tuple[str, int]]:
    """One statement. A group that somebody claims or closes meanwhile is left to them."""
    # Of a cancelled job too: where no proposer is left, nobody would close its groups.
    waits = (
        group_is_open(),  # spelled out for the index
        *is_free(Group, Stage.PROPOSE, now),
        Group.ready_at < now - patience_sec,
        Group.lease_until < now - patience_sec,
        ~_drafts_arrive(now, patience_sec),
    )
    key = (Group.job_id, Group.group_index)
    # Groups of many jobs, and no job's row held: to wait for one of them could be a deadlock.
    unlocked = select(*key).where(*waits).with_for_update(skip_locked=True)
    rows = conn.execute(
        update(Group)
        .where(*waits, tuple_(*key).in_(unlocked))
        .values(**sent_on(Stage.VERIFY, now), generation=Group.generation + 1)
        .returning(*key)
    )
    return sorted((row.job_id, row.group_index) for row in rows)


def _drafts_arrive(now: Now, patience_sec: float) -> ColumnElement[bool]:
    """Whether some proposer works on the group's job, or a drafted group of it got on lately.

    Those who wait behind a busy proposer need not go without it.
    """
    other = aliased(Group)
    is_held = (other.stage == Stage.PROPOSE.value) & (other.lease_until > now)
    got_on = (other.stage != Stage.PROPOSE.value) & (other.ready_at > now - patience_sec)
    return exists().where(
        other.job_id == Group.job_id,
        other.first_stage == Stage.PROPOSE.value,
        is_held | got_on,
    )
