"""Which workers may verify a job: what it has pinned, beside what a worker serves.

A job pins its numeric class once, in a transaction of its own, before its first group is claimed
for VERIFY. Claims then compare: in the statement that claims, and once more behind it, because on
PostgreSQL that statement may have waited for a row while the job was moved to another class.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, or_, select, update

from specbatch.pipeline.ledger import chain, entries, jobs
from specbatch.pipeline.ledger.transactions import Now
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.numeric_class import UNKNOWN, Serves, key_of_spec, preferred
from specbatch.schemas.tables import Job
from specbatch.schemas.time_tables import WorkerSession
from specbatch.schemas.timekeeping import LEASES_OF_SILENCE

PINNED = select(Job.numeric_class).where(Job.job_id == bindparam("of_job"))


class UnpinnedError(Exception):
    """A job that has no numeric class yet was about to be claimed: it must pin one before."""

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id)
        self.job_id = job_id


class MovedError(Exception):
    """A job was moved to another class while a group of it was being claimed."""


def check(serves: Serves, job_id: str, pinned: str | None) -> None:
    """Behind a claim's statement, with the job's class as it stands then. What it raises takes the
    claim back, with its transaction: `UnpinnedError`, `MovedError`."""
    if pinned is None:
        raise UnpinnedError(job_id)
    if not serves.takes(pinned):
        raise MovedError(job_id)


def served(serves: Serves | None, table: Any = Job) -> list[ColumnElement[bool]]:
    """What is true of a job that such a worker may verify. None: it may verify any."""
    if serves is None:
        return []
    pinned = table.numeric_class
    return [or_(pinned.is_(None), pinned.in_([UNKNOWN, *serves.names]))]


def job_is_served(job_id: Any, serves: Serves | None) -> list[ColumnElement[bool]]:
    """The same, of a group of the job with this id."""
    if serves is None:
        return []
    return [select(Job.job_id).where(Job.job_id == job_id, *served(serves)).exists()]


def pinned_class(conn: Connection, job_id: str) -> str | None:
    """The class of a job as it stands now; None: it has none yet, or there is no such job."""
    return conn.scalar(PINNED, {"of_job": job_id})


def pin(
    conn: Connection, now: Now, job_id: str, serves: Serves, owner: str, lease_sec: float
) -> None:
    """Choose a job's numeric class, if it has none: the one with most live workers.

    Whoever holds the job's row decides; all others find it decided.
    """
    job = jobs.lock(conn, job_id)
    if job is None or job.numeric_class is not None:
        return
    alive = _alive(conn, now, job.verifier, serves, owner, lease_sec)
    name = preferred(key_of_spec(job.spec), serves, alive)
    assert name is not None, "a worker announces a class for every way to ask for an engine"
    head = chain.link(conn, now, job, EntryKind.PINNED, entries.class_pinned(name), owner)
    conn.execute(update(Job).where(Job.job_id == job_id).values(numeric_class=name, **head))


def _alive(
    conn: Connection, now: Now, model: str, own: Serves, owner: str, lease_sec: float
) -> list[Serves]:
    """What live workers with this model serve; `own` once, whether it was heard of or not."""
    rows = conn.execute(
        select(WorkerSession.owner, WorkerSession.serves).where(
            WorkerSession.ended_at.is_(None),
            WorkerSession.beat_at > now - LEASES_OF_SILENCE * lease_sec,
            WorkerSession.serves.is_not(None),
        )
    )
    told = [(row.owner, Serves.from_json(row.serves)) for row in rows]
    others = [one for who, one in told if one and one.model == model and who != owner]
    return [own, *others]
