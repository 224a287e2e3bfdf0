"""A running job is moved to another numeric class or model, because somebody asked for it.

Whoever holds one of its groups at VERIFY loses it, and with it what was not finished: that group
starts again, so no completion has tokens of two. Finished results stay, and say of which they are.
"""

from __future__ import annotations

from sqlalchemy import Connection, case, func, select, update

from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.sql import chain, jobs
from specbatch.pipeline.ledger.sql.jobs import FREE
from specbatch.pipeline.ledger.sql.transactions import Now
from specbatch.schemas import mapper
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.numeric_class import Change
from specbatch.schemas.records import Stage
from specbatch.schemas.tables import Group, Job


def move(conn: Connection, now: Now, job_id: str, change: Change, quarantined: bool = False) -> int:
    """How many groups will be verified otherwise; 0: what is asked for is the job's already."""
    job = jobs.lock(conn, jobs.find(conn, job_id).job_id)
    row = mapper.job_row(job)
    rules.check_move(row, change, quarantined)
    pinned = rules.columns_of(row, change)
    if not pinned:
        return 0
    head = chain.link(conn, now, job, EntryKind.PINNED, pinned)
    conn.execute(update(Job).where(Job.job_id == job.job_id).values(**pinned, **head))
    # All of them, the free ones too: who is just claiming one holds its row, and is waited for.
    conn.execute(
        update(Group)
        .where(Group.job_id == job.job_id, Group.stage == Stage.VERIFY.value)
        .values(
            generation=Group.generation + 1,  # a late holder is fenced
            attempts=0,
            ready_at=case((Group.lease_until > now, now), else_=Group.ready_at),
            cut_wanted=False,
            **FREE,
        )
    )
    waiting = Group.stage.in_([stage.value for stage in rules.CANCELLABLE])
    open_groups = select(func.count()).where(Group.job_id == job.job_id, waiting)
    return int(conn.scalar(open_groups) or 0)
