"""Which workers may verify a job: what it has pinned, beside what a worker serves.

A job pins its models' fingerprints when its input is begun, and its numeric class once, in a
transaction of its own, before its first group is claimed for VERIFY. Claims then compare: in the
statement that claims, and once more behind it, because on PostgreSQL that statement may have waited
for a row while the job was moved to another class or model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, or_, select, update

from specbatch.pipeline.ledger.sql import chain, jobs
from specbatch.pipeline.ledger.sql.transactions import Now
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.numeric_class import UNKNOWN, Pinned, Serves, key_of_spec, preferred
from specbatch.schemas.tables import Job
from specbatch.schemas.time_tables import WorkerSession
from specbatch.schemas.timekeeping import LEASES_OF_SILENCE

PINNED_COLUMNS = (Job.numeric_class, Job.model_fingerprint, Job.proposer_fingerprint)
PINNED = select(*PINNED_COLUMNS).where(Job.job_id == bindparam("of_job"))


def pinned_columns() -> Iterator[ColumnElement[str | None]]:
    """Of the job `of_job`, in the order of `Pinned`: for RETURNING."""
    for column in PINNED_COLUMNS:
        of_job = select(column).where(Job.job_id == bindparam("of_job"))
        yield of_job.scalar_subquery().label(column.key)


class UnpinnedError(Exception):
    """A job that has no numeric class yet was about to be claimed: it must pin one before."""

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id)
        self.job_id = job_id


class MovedError(Exception):
    """A job was moved to another class or model while a group of it was being claimed."""


def check(serves: Serves, job_id: str, pinned: Pinned) -> None:
    """Behind a claim's statement, with what the job has pinned then. What it raises takes the
    claim back, with its transaction: `UnpinnedError`, `MovedError`."""
    if pinned.numeric_class is None:
        raise UnpinnedError(job_id)
    if not serves.takes(pinned):
        raise MovedError(job_id)


def served(serves: Serves | None, table: Any = Job) -> list[ColumnElement[bool]]:
    """What is true of a job that such a worker may verify. None: it may verify any."""
    if serves is None:
        return []
    models = [] if serves.fingerprint is None else [serves.fingerprint.digest]
    served_values = (
        (table.numeric_class, [UNKNOWN, *serves.names]),
        (table.model_fingerprint, [UNKNOWN, *models]),
        (table.proposer_fingerprint, serves.drafts),
    )
    own = [] if serves.only_job is None else [table.job_id == serves.only_job]
    return [*own, *(or_(col.is_(None), col.in_(values)) for col, values in served_values)]


def job_is_served(job_id: Any, serves: Serves | None) -> list[ColumnElement[bool]]:
    """The same, of a group of the job with this id."""
    if serves is None:
        return []
    return [select(Job.job_id).where(Job.job_id == job_id, *served(serves)).exists()]


def pinned(conn: Connection, job_id: str) -> Pinned:
    """What a job has pinned as it stands now; nothing, where there is no such job."""
    row = conn.execute(PINNED, {"of_job": job_id}).first()
    return Pinned() if row is None else Pinned.of(row)


def pin(
    conn: Connection, now: Now, job_id: str, serves: Serves, owner: str, lease_sec: float
) -> None:
    """Choose a job's numeric class, if it has none: the one with most live workers.

    Whoever holds the job's row decides; all others find it decided.
    """
    job = jobs.lock(conn, job_id)
    if job is None or job.numeric_class is not None:
        return
    alive = _alive(conn, now, job, serves, owner, lease_sec)
    name = preferred(key_of_spec(job.spec), serves, alive)
    assert name is not None, "a worker announces a class for every way to ask for an engine"
    pinned = {"numeric_class": name}
    head = chain.link(conn, now, job, EntryKind.PINNED, pinned, owner)
    conn.execute(update(Job).where(Job.job_id == job_id).values(**pinned, **head))


def _alive(
    conn: Connection, now: Now, job: Any, own: Serves, owner: str, lease_sec: float
) -> list[Serves]:
    """What live workers with the job's model serve; `own` once, whether heard of or not."""
    rows = conn.execute(
        select(WorkerSession.owner, WorkerSession.serves).where(
            WorkerSession.ended_at.is_(None),
            WorkerSession.beat_at > now - LEASES_OF_SILENCE * lease_sec,
            WorkerSession.serves.is_not(None),
        )
    )
    told = [(row.owner, Serves.from_json(row.serves)) for row in rows]
    others = [
        one
        for who, one in told
        if one and one.model == job.verifier and one.has_model(job.model_fingerprint)
        if one.works_on(job.job_id)
        if who != owner
    ]
    return [own, *others]
