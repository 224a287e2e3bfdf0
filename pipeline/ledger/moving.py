"""A running job is moved to another numeric class, because somebody asked for it.

Whoever holds one of its groups at VERIFY loses it, and with it what was not finished: that group
starts again, so no completion has bits of two classes. Finished results stay, and say their class.
"""

from __future__ import annotations

from sqlalchemy import Connection, case, func, select, update

from specbatch.pipeline.ledger import chain, entries, jobs, rules
from specbatch.pipeline.ledger.jobs import FREE
from specbatch.pipeline.ledger.transactions import Now
from specbatch.schemas import mapper
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.records import Stage
from specbatch.schemas.tables import Group, Job


def move(
    conn: Connection, now: Now, job_id: str, numeric_class: str, quarantined: bool = False
) -> int:
    """How many groups will be verified in the other class; 0: it is the job's already."""
    job = jobs.lock(conn, jobs.find(conn, job_id).job_id)
    rules.check_move(mapper.job_row(job), numeric_class, quarantined)
    if job.numeric_class == numeric_class:
        return 0
    said = entries.class_pinned(numeric_class)
    head = chain.link(conn, now, job, EntryKind.PINNED, said)
    conn.execute(
        update(Job).where(Job.job_id == job.job_id).values(numeric_class=numeric_class, **head)
    )
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
