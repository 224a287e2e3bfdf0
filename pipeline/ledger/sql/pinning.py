"""Which workers may verify a job: what it has pinned, compared with what a worker serves.

A job pins its models' fingerprints when its input is begun, and its numeric class once, in a
transaction of its own, before its first group is claimed for VERIFY. Claims then compare: in the
statement that claims, and once more behind it, because on PostgreSQL that statement may have waited
for a row while the job was moved to another class or model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, case, func, or_, select, update

from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.sql import audit_log, jobs
from specbatch.pipeline.ledger.sql.jobs import FREE
from specbatch.pipeline.ledger.sql.transactions import Now
from specbatch.schemas import mapper
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.numeric_class import (
    UNKNOWN,
    Change,
    Pinned,
    Serves,
    key_of_spec,
    preferred,
)
from specbatch.schemas.placement import SPOT, PlacementSpec, Site
from specbatch.schemas.records import Stage
from specbatch.schemas.tables import Group, Job, WorkerSession

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
    """Compare again after the claim, with what the job has pinned now.

    Raises `UnpinnedError` and `MovedError`, which roll the claim back.
    """
    if pinned.numeric_class is None:
        raise UnpinnedError(job_id)
    if not serves.takes(pinned):
        raise MovedError(job_id)


def served(serves: Serves | None, table: Any = Job) -> list[ColumnElement[bool]]:
    """The conditions of jobs that such a worker may verify. None: any job."""
    if serves is None:
        return []
    models = [] if serves.fingerprint is None else [serves.fingerprint.digest]
    served_values = (
        (table.numeric_class, [UNKNOWN, *serves.names]),
        (table.model_fingerprint, [UNKNOWN, *models]),
        (table.proposer_fingerprint, serves.drafts),
    )
    own = [] if serves.only_job is None else [table.job_id == serves.only_job]
    keys = sorted(
        {key for key, _ in serves.classes}
    )  # without a class it must ask for one of these
    own.append(or_(table.numeric_class.is_not(None), _key(table).in_(keys)))
    return [*own, *(or_(col.is_(None), col.in_(values)) for col, values in served_values)]


def _key(table: Any) -> ColumnElement[str]:
    """`key_of_spec` of a job without a class, in SQL."""

    def option(name: str, default: str) -> ColumnElement[str]:
        return func.coalesce(table.spec[("engine", name)].as_string(), default)

    dtype, exactness = option("dtype", "auto"), option("exactness", "bitwise")
    kind = table.spec[("proposer", "kind")].as_string()  # null where the proposer is a text
    model = func.coalesce(":" + table.spec[("proposer", "model")].as_string(), "")
    speculation = func.coalesce("/" + kind + model, "")
    return dtype + "/" + exactness + "/" + option("verifier_weights", "as-is") + speculation


def job_is_served(job_id: Any, serves: Serves | None) -> list[ColumnElement[bool]]:
    """The same for groups of the job with this id."""
    if serves is None:
        return []
    return [select(Job.job_id).where(Job.job_id == job_id, *served(serves)).exists()]


def pinned(conn: Connection, job_id: str) -> Pinned:
    """What a job has pinned now; nothing when there is no such job."""
    row = conn.execute(PINNED, {"of_job": job_id}).first()
    return Pinned() if row is None else Pinned.of(row)


def pin(
    conn: Connection, now: Now, job_id: str, serves: Serves, owner: str, lease_sec: float
) -> None:
    """Pin the numeric class with most live workers, unless the job has one.

    The first to lock the job's row decides; all others find it decided.
    """
    job = jobs.lock(conn, job_id)
    if job is None or job.numeric_class is not None:
        return
    alive = _alive(conn, now, job, serves, owner, lease_sec)
    name = preferred(key_of_spec(job.spec), serves, alive)
    assert name is not None, "a worker announces a class for every way to ask for an engine"
    pinned = {"numeric_class": name}
    head = audit_log.link(conn, now, job, EntryKind.PINNED, pinned, owner)
    conn.execute(update(Job).where(Job.job_id == job_id).values(**pinned, **head))


def _alive(
    conn: Connection, now: Now, job: Any, own: Serves, owner: str, lease_sec: float
) -> list[Serves]:
    """What live workers with the job's model serve where its rows may be; `own` counts once.

    A worker that was not heard of for a lease has no say: a class of dead workers would wait.
    """
    placement = PlacementSpec.model_validate(job.spec.get("placement") or {})
    rows = conn.execute(
        select(
            WorkerSession.owner, WorkerSession.serves, WorkerSession.region, WorkerSession.tenure
        ).where(
            WorkerSession.ended_at.is_(None),
            WorkerSession.beat_at > now - lease_sec,
            WorkerSession.serves.is_not(None),
        )
    )
    offers = [
        (row.owner, Serves.from_json(row.serves))
        for row in rows
        if placement.allows(Site(row.region, row.tenure == SPOT))
    ]
    others = [
        one
        for who, one in offers
        if one and one.model == job.verifier and one.has_model(job.model_fingerprint)
        if one.works_on(job.job_id)
        if who != owner
    ]
    return [own, *others]


# --- moving a running job -------------------------------------------------------------------


def move(conn: Connection, now: Now, job_id: str, change: Change, quarantined: bool = False) -> int:
    """Move a running job to another numeric class or model, because a user asked for it.

    Holders of its groups at VERIFY lose them, with all unfinished rows: these groups restart, so no
    completion has tokens of two models. Finished results stay, and name theirs. Returns how many
    groups will be verified differently; 0: the job has this class and model already.
    """
    job = jobs.lock(conn, jobs.find(conn, job_id).job_id)
    row = mapper.job_row(job)
    rules.check_move(row, change, quarantined)
    pinned = rules.columns_of(row, change)
    if not pinned:
        return 0
    head = audit_log.link(conn, now, job, EntryKind.PINNED, pinned)
    conn.execute(update(Job).where(Job.job_id == job.job_id).values(**pinned, **head))
    # Free groups too: a worker that is just claiming one holds its row, and is waited for.
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
