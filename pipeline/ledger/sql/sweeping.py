"""A sweeper's statements: due units, exhausted groups, groups that wait too long for drafts."""

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
    or_,
    select,
    true,
    tuple_,
    update,
)
from sqlalchemy.orm import aliased

from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.sql import budgets
from specbatch.pipeline.ledger.sql.leases import is_free, sent_on
from specbatch.pipeline.ledger.sql.transactions import Now
from specbatch.schemas import mapper
from specbatch.schemas.records import DueWork, Stage
from specbatch.schemas.tables import Group, Job, group_is_open, job_is_due


def due(conn: Connection, now: Now, limit: int = 256, job_id: str | None = None) -> list[DueWork]:
    """Jobs first, then groups, the longest ready first, `limit` of each kind.

    Groups that a tenant's budget holds back are not among them.
    """
    age = (Job.ready_at, Job.job_id)
    jobs = _oldest_of_each_kind(
        select(Job.job_id, Job.stage, Job.priority)
        .where(job_is_due(), Job.lease_until <= now, Job.ingest_resumes_at.is_(None))
        .where(true() if job_id is None else Job.job_id == job_id),
        age,
        (Job.stage, Job.priority),
        limit,
    )
    of_it = None if job_id is None else [job_id]
    is_held_back = budgets.is_held_back(budgets.shortfalls(conn, now, of_it))
    model = case((Group.stage == Stage.PROPOSE.value, Job.proposer), else_=Job.verifier)
    groups = _oldest_of_each_kind(
        select(
            Group.job_id, Group.group_index, Group.stage, Job.verifier, Job.proposer, Job.priority
        )
        .join(Job, Job.job_id == Group.job_id)
        .where(group_is_open(), Group.lease_until <= now)
        .where(true() if job_id is None else Group.job_id == job_id)
        .where(~is_held_back),
        (Group.ready_at, Group.job_id, Group.group_index),
        (Group.stage, model, Job.priority),
        limit,
    )
    job_rows, group_rows = conn.execute(jobs).all(), conn.execute(groups).all()
    return [*map(mapper.due_job, job_rows), *map(mapper.due_group, group_rows)]


def _oldest_of_each_kind(
    units: Select[*tuple[Any, ...]], age: Sequence[Any], kind: Sequence[Any], limit: int
) -> Select[*tuple[Any, ...]]:
    """Without kinds, units that wait for a model nobody serves would hide all later ones."""
    place = func.row_number().over(partition_by=kind, order_by=age).label("place")
    total = func.row_number().over(order_by=age).label("age")
    found = units.add_columns(place, total).subquery()
    return select(found).where(found.c.place <= limit).order_by(found.c.age)


def skip_proposals(conn: Connection, now: Now, patience_sec: float) -> list[tuple[str, int]]:
    """One statement. A group that is claimed or closed meanwhile is left alone."""
    # Cancelled jobs too: without a proposer, nobody would close their groups.
    waits = (
        group_is_open(),  # spelled out for the index
        *is_free(Group, Stage.PROPOSE, now),
        Group.ready_at < now - patience_sec,
        Group.lease_until < now - patience_sec,
        ~_drafts_arrive(now, patience_sec),
    )
    key = (Group.job_id, Group.group_index)
    # Groups of many jobs, and no job's row is locked: waiting for one could be a deadlock.
    unlocked = select(*key).where(*waits).with_for_update(skip_locked=True)
    rows = conn.execute(
        update(Group)
        .where(*waits, tuple_(*key).in_(unlocked))
        .values(**sent_on(Stage.VERIFY, now), generation=Group.generation + 1)
        .returning(*key)
    )
    return sorted((row.job_id, row.group_index) for row in rows)


def _drafts_arrive(now: Now, patience_sec: float) -> ColumnElement[bool]:
    """Whether a proposer works on the group's job, or one of its groups left PROPOSE lately.

    Groups behind a busy proposer wait for it.
    """
    other = aliased(Group)
    is_held = (other.stage == Stage.PROPOSE.value) & (other.lease_until > now)
    got_on = (other.stage != Stage.PROPOSE.value) & (other.ready_at > now - patience_sec)
    return exists().where(
        other.job_id == Group.job_id,
        other.first_stage == Stage.PROPOSE.value,
        is_held | got_on,
    )


def closable(
    conn: Connection, now: Now, max_attempts: int, limit: int
) -> list[tuple[str, int, Stage]]:
    """Free groups that nobody may claim any more: (job id, index, stage)."""
    spent = Group.attempts >= max_attempts
    cancelled = Job.cancel_requested & Group.stage.in_([s.value for s in rules.CANCELLABLE])
    rows = conn.execute(
        select(Group.job_id, Group.group_index, Group.stage)
        .join(Job, Job.job_id == Group.job_id)
        .where(group_is_open(), Group.lease_until <= now, or_(spent, cancelled))
        .order_by(Group.job_id, Group.group_index)
        .limit(limit)
    )
    return [(row.job_id, row.group_index, Stage(row.stage)) for row in rows]
