"""Which completion answered which request, so that the same request need not be computed again."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, delete, exists, select, tuple_

from specbatch.pipeline.audit.digests import content_digest
from specbatch.pipeline.ledger.sql import residency
from specbatch.pipeline.ledger.sql.audit_log import SPOILT, readable_record
from specbatch.pipeline.ledger.sql.reading import MODELS_OF_JOB
from specbatch.pipeline.ledger.sql.transactions import Now, upsert
from specbatch.schemas.audit_tables import Audit
from specbatch.schemas.placement import ANYWHERE, PlacementSpec
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.records import Answered, CompletionRecord
from specbatch.schemas.tables import Completion, Job
from specbatch.schemas.tables import ReusableOutput as Table

log = logging.getLogger(__name__)

_AT_ONCE = 500  # requests in one statement


def offer(
    conn: Connection, _now: Now, job_id: str, requests: Mapping[bytes, tuple[int, int]]
) -> None:
    """The newest completion of a request takes the place of an older one."""
    # Locked, so that a purge comes before, and is seen, or after, and deletes what is added.
    here = select(Job.tenant).where(Job.job_id == job_id, Job.purged_at.is_(None))
    tenant = conn.scalar(here.with_for_update(read=True))
    if tenant is None or not requests:
        return
    rows = [
        {"tenant": tenant, "request": digest, "job_id": job_id, "row_index": r, "sample_index": s}
        for digest, (r, s) in sorted(requests.items())  # in one order everywhere: no deadlock
    ]
    adding = upsert(conn.dialect.name, Table)
    found = {name: adding.excluded[name] for name in ("job_id", "row_index", "sample_index")}
    keys = [Table.tenant, Table.request]
    conn.execute(adding.on_conflict_do_update(index_elements=keys, set_=found), rows)


def answered(
    conn: Connection,
    tenant: str,
    requests: Sequence[bytes],
    placement: PlacementSpec = ANYWHERE,
) -> dict[bytes, Answered]:
    """Of these requests, those that have an answer whose texts are kept in full."""
    found = {}
    for begin in range(0, len(requests), _AT_ONCE):
        try:
            query = _query(tenant, requests[begin : begin + _AT_ONCE], placement)
            rows = conn.execute(query).all()
        except SPOILT as error:
            log.error("earlier outputs cannot be read, so these are computed again: %s", error)
            continue
        for row in rows:
            if (record := _intact(row)) is not None:
                found[bytes(row.request)] = Answered(row.job_id, record)
    return found


def _intact(row: Row[Any]) -> CompletionRecord | None:
    """The completion, as it was recorded; None if its tokens or texts were changed since."""
    record = readable_record(row)
    if record is not None and row.digest == content_digest(record):
        return record
    log.error(
        "row %s of job %s was changed after it was recorded, and is not reused: audit the job with "
        "`specbatch audit %s`",
        *(row.row_index, row.job_id, row.job_id),
    )
    return None


def _query(tenant: str, requests: Sequence[bytes], placement: PlacementSpec) -> Select[Any]:
    """Not of jobs in which an audit found a token that is not the verifier's."""
    disproved = exists().where(Audit.job_id == Table.job_id, Audit.differing > 0)
    of = (Completion.job_id, Completion.row_index, Completion.sample_index)
    return (
        select(
            *Completion.__table__.c,
            *MODELS_OF_JOB,
            Table.request,
        )
        .join(Completion, tuple_(Table.job_id, Table.row_index, Table.sample_index) == tuple_(*of))
        .join(Job, Job.job_id == Table.job_id)
        .where(Table.tenant == tenant, Table.request.in_(requests))
        .where(Job.purged_at.is_(None), Job.privacy == PrivacyMode.FULL.value)
        .where(~disproved, *residency.readable(placement))
    )


def forget(conn: Connection, job_id: str) -> None:
    """No answer of this job is given again."""
    conn.execute(delete(Table).where(Table.job_id == job_id))
