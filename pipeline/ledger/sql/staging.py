"""Statements on staged parts. The last row of a job is the part that is being written, if one is.

A part's claim does not need the job's own lease: ingest may hold that meanwhile. Each claim has a
token of its own. Once the job is at PUBLISH no part is claimed or noted
any more, so its publisher reads notes that do not change.
"""

from __future__ import annotations

import uuid
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, insert, select, update

from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.sql import jobs
from specbatch.pipeline.ledger.sql import usage as sql_usage
from specbatch.pipeline.ledger.sql.reading import PROMPTS
from specbatch.pipeline.ledger.sql.transactions import Now
from specbatch.schemas import mapper
from specbatch.schemas.errors import FencedError
from specbatch.schemas.records import FIRST_SPLIT_INDEX, Lease, Prompts, Stage
from specbatch.schemas.staging import FIRST_PLACE, PartClaim, PartPlace, StagedPart
from specbatch.schemas.staging_tables import Staged
from specbatch.schemas.tables import Completion, Group, Job, Rejected
from specbatch.schemas.usage import UsageMeter

_WHILE_AT = (Stage.INGEST.value, Stage.RUN.value)


def first_unrecorded(conn: Connection, job_id: str) -> tuple[Prompts | None, int]:
    # Read first: groups that ingest adds meanwhile have later rows.
    next_row = conn.scalar(select(Job.next_row).where(Job.job_id == job_id)) or 0
    unrecorded = (
        select(*PROMPTS)
        .where(Group.job_id == job_id, Group.stage != Stage.DONE.value)
        .order_by(Group.group_index)
    )
    planned = unrecorded.where(Group.group_index < FIRST_SPLIT_INDEX).limit(1)
    split_off = unrecorded.where(Group.group_index >= FIRST_SPLIT_INDEX)
    found = [row for query in (planned, split_off) for row in conn.execute(query)]
    return min(map(mapper.prompts, found), key=rules.row_order, default=None), next_row


def next_part(conn: Connection, now: Now, max_attempts: int, job_id: str) -> PartPlace | None:
    if conn.scalar(select(Job.stage).where(Job.job_id == job_id)) not in _WHILE_AT:
        return None
    place, is_free, attempts = _next(conn, now, job_id)
    return place if is_free and attempts < max_attempts else None


def rows_between(conn: Connection, job_id: str, first: int, before: int, most: int) -> int:
    found = 0
    for table in (Completion, Rejected):
        which = (table.job_id == job_id, table.row_index >= first, table.row_index < before)
        some = select(table.row_index).where(*which).limit(most).subquery()
        found += conn.scalars(select(func.count()).select_from(some)).one()
    return min(found, most)


def claim_part(
    conn: Connection, now: Now, max_attempts: int, job_id: str, place: PartPlace, lease_sec: float
) -> PartClaim | None:
    job = jobs.lock(conn, job_id)
    if job is None or job.stage not in _WHILE_AT:
        return None
    following, is_free, attempts = _next(conn, now, job_id)
    if following != place or not is_free or attempts >= max_attempts:
        return None
    claim = PartClaim(job_id, place, uuid.uuid4().hex)
    values = {"token": claim.token, "lease_until": now + lease_sec, "attempts": attempts + 1}
    this = (Staged.job_id == job_id, Staged.number == place.number)
    if not conn.execute(update(Staged).where(*this).values(**values)).rowcount:
        conn.execute(insert(Staged).values(job_id=job_id, number=place.number, **values))
    return claim


def extend_part(conn: Connection, now: Now, claim: PartClaim, lease_sec: float) -> None:
    _update(conn, claim, lease_until=now + lease_sec)


def note_part(
    conn: Connection,
    _now: Now,
    claim: PartClaim,
    part: StagedPart,
    by: Lease | None = None,
    usage: UsageMeter | None = None,
) -> None:
    this = (Staged.job_id == claim.job_id, Staged.number == claim.place.number)
    row = conn.execute(select(*Staged.__table__.c).where(*this)).first()
    if row is not None and row.sha256 is not None and _noted(row) == part:
        return  # the answer to this very commit was lost
    _update(
        conn,
        claim,
        lease_until=0.0,
        schema_version=part.schema_version,
        rows=part.rows,
        rejected=part.rejected,
        size_bytes=part.size_bytes,
        sha256=part.sha256,
        next_row=part.then.row_index,
        next_skip=part.then.skip,
    )
    if by is not None:
        sql_usage.keep(conn, by, usage)


def staged_parts(conn: Connection, job_id: str) -> list[StagedPart]:
    noted = (Staged.job_id == job_id, Staged.sha256.is_not(None))
    rows = conn.execute(select(*Staged.__table__.c).where(*noted).order_by(Staged.number))
    return list(map(_noted, rows))


def _noted(row: Any) -> StagedPart:
    return StagedPart(
        row.number,
        row.token,
        row.schema_version,
        row.rows,
        row.rejected,
        row.size_bytes,
        row.sha256,
        _then(row),
    )


def _next(conn: Connection, now: Now, job_id: str) -> tuple[PartPlace, bool, int]:
    """The place of the first part that is not noted, whether nobody writes it, and how often it
    was claimed."""
    is_held: ColumnElement[bool] = (Staged.lease_until > now).label("is_held")
    newest = select(*Staged.__table__.c, is_held).where(Staged.job_id == job_id)
    rows = conn.execute(newest.order_by(Staged.number.desc()).limit(2)).all()
    claimed = rows[0] if rows and rows[0].sha256 is None else None
    noted = next((row for row in rows if row.sha256 is not None), None)
    place = FIRST_PLACE if noted is None else _then(noted)
    if claimed is None:
        return place, True, 0
    return place, not claimed.is_held, claimed.attempts


def _then(row: Any) -> PartPlace:
    return PartPlace(row.number + 1, row.next_row, row.next_skip)


def _update(conn: Connection, claim: PartClaim, **values: Any) -> None:
    """Write to a claimed part of a job that is not being published."""
    job = jobs.lock(conn, claim.job_id)
    this = (Staged.job_id == claim.job_id, Staged.number == claim.place.number)
    mine = (Staged.token == claim.token, Staged.sha256.is_(None))
    is_open = job is not None and job.stage in _WHILE_AT
    if (
        not is_open
        or not conn.execute(update(Staged).where(*this, *mine).values(**values)).rowcount
    ):
        raise FencedError(
            f"part {claim.place.number} of job {claim.job_id} is no longer to be staged here: the "
            "job is being published, or another worker writes the part"
        )
