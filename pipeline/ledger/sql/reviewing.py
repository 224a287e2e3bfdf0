"""Completions that content policies hold back for review, and what was decided on them.

A completion's row does not change: the decision is an entry of the audit log, of which the first
counts. The next publication of the job goes by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import orjson
from sqlalchemy import Connection, select

from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.sql import audit_log, jobs
from specbatch.pipeline.ledger.sql.transactions import Now
from specbatch.schemas import mapper
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.audit_tables import AuditLog
from specbatch.schemas.policies import HELD_BACK, NO_REVIEWS, Decided, HeldBack, Place, Reviews
from specbatch.schemas.records import FinishReason, JobState, Stage
from specbatch.schemas.tables import Completion, Job


def reviews(conn: Connection, job_id: str) -> Reviews:
    job = conn.execute(select(Job.report, Job.purged_at).where(Job.job_id == job_id)).first()
    # Else all of its completions would be looked at.
    if job is None or job.purged_at is not None or not (job.report or {}).get(HELD_BACK):
        return NO_REVIEWS
    held = conn.execute(
        select(
            *(Completion.row_index, Completion.sample_index),
            *(Completion.group_index, Completion.error),
        )
        .where(Completion.job_id == job_id, Completion.finish_reason == FinishReason.REVIEW.value)
        .order_by(Completion.row_index, Completion.sample_index)
    ).all()
    payloads = conn.scalars(
        select(AuditLog.payload)
        .where(AuditLog.job_id == job_id, AuditLog.kind == EntryKind.REVIEWED.value)
        .order_by(AuditLog.number)
    ).all()
    return Reviews(
        {(h.row_index, h.sample_index): HeldBack(h.group_index, h.error or "") for h in held},
        _decided(payloads),
        len(payloads),
    )


def _decided(payloads: Iterable[str]) -> dict[Place, Decided]:
    found: dict[Place, Decided] = {}
    for payload in payloads:
        for row, sample, decision in orjson.loads(payload)["decided"]:
            found.setdefault((row, sample), Decided(decision))
    return found


def review(
    conn: Connection, now: Now, job_id: str, decided: Mapping[Place, Decided], by: str = ""
) -> None:
    """One transaction: the entry of the log, and the job goes to PUBLISH again."""
    row = jobs.lock(conn, jobs.find(conn, job_id).job_id)
    found = reviews(conn, row.job_id)
    rules.check_review(mapper.job_row(row), row.ingest_done, found, decided)
    said = {"decided": [[*place, decision.value] for place, decision in sorted(decided.items())]}
    head = audit_log.link(conn, now, row, EntryKind.REVIEWED, said, by or None)
    values = {"error": None, "finished_at": None, **head}
    jobs.move(conn, now, row.job_id, Stage.PUBLISH, state=JobState.RUNNING.value, **values)
