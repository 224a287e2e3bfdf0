"""Which completion answered which request, so that the same request need not be computed again."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Select, delete, select, tuple_

from specbatch.pipeline.audit.digests import content_digest
from specbatch.pipeline.ledger.sql.transactions import Now, upsert
from specbatch.schemas import completion_rows
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.records import Answered
from specbatch.schemas.tables import Completion, Job
from specbatch.schemas.tables import ReusableOutput as Table

log = logging.getLogger(__name__)

_AT_ONCE = 500  # requests in one statement


def offer(
    conn: Connection, _now: Now, job_id: str, requests: Mapping[bytes, tuple[int, int]]
) -> None:
    """The newest completion of a request takes the place of an older one."""
    tenant = conn.scalar(select(Job.tenant).where(Job.job_id == job_id, Job.purged_at.is_(None)))
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


def answered(conn: Connection, tenant: str, requests: Sequence[bytes]) -> dict[bytes, Answered]:
    """Of these requests, those that have an answer whose texts are kept in full."""
    found = {}
    for begin in range(0, len(requests), _AT_ONCE):
        for row in conn.execute(_query(tenant, requests[begin : begin + _AT_ONCE])):
            record = completion_rows.completion_record(row)
            answer = Answered(row.job_id, record)
            if row.digest == content_digest(record):
                found[bytes(row.request)] = answer
            else:
                log.error(
                    "completion %s was changed after it was recorded, and is not reused: audit the "
                    "job with `specbatch audit %s`",
                    *(answer.name, answer.job_id),
                )
    return found


def _query(tenant: str, requests: Sequence[bytes]) -> Select[Any]:
    of = (Completion.job_id, Completion.row_index, Completion.sample_index)
    return (
        select(
            *Completion.__table__.c,
            Table.request,
            Job.verifier.label("job_verifier"),
            Job.proposer.label("job_proposer"),
        )
        .join(Completion, tuple_(Table.job_id, Table.row_index, Table.sample_index) == tuple_(*of))
        .join(Job, Job.job_id == Table.job_id)
        .where(Table.tenant == tenant, Table.request.in_(requests))
        .where(Job.purged_at.is_(None), Job.privacy == PrivacyMode.FULL.value)
    )


def forget(conn: Connection, job_id: str) -> None:
    """No answer of this job is given again."""
    conn.execute(delete(Table).where(Table.job_id == job_id))
