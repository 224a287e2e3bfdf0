"""Drafting switched off by an operator: one row per switch, and an entry in each job's log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, select, update

from specbatch.pipeline.audit import entries
from specbatch.pipeline.ledger.sql import audit_log, jobs
from specbatch.pipeline.ledger.sql.transactions import Now, upsert
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.draft_switches import DraftSwitch, SwitchScope
from specbatch.schemas.masking import masked
from specbatch.schemas.tables import DraftSwitch as Table
from specbatch.schemas.tables import Job, job_is_live


def switch_off(
    conn: Connection, now: Now, scope: SwitchScope, reason: str
) -> tuple[DraftSwitch, bool]:
    """Of several callers at once exactly one makes the switch; the others find it."""
    values = {"off_by": audit_log.actor_of(conn), "reason": masked(reason), "off_at": now}
    added = upsert(conn.dialect.name, Table).values(**asdict(scope), **values)
    added = added.on_conflict_do_nothing().returning(*Table.__table__.c)
    row = conn.execute(added).first()
    if row is None:
        there = select(*Table.__table__.c).where(*_is_active(scope))
        return _switch(conn.execute(there).one()), False
    _log(conn, now, scope, entries.switched(scope, is_off=True, reason=row.reason))
    return _switch(row), True


def switch_on(conn: Connection, now: Now, scope: SwitchScope) -> DraftSwitch | None:
    values = {"on_at": now, "on_by": audit_log.actor_of(conn)}
    ended = update(Table).where(*_is_active(scope)).values(**values)
    row = conn.execute(ended.returning(*Table.__table__.c)).first()
    if row is None:
        return None
    _log(conn, now, scope, entries.switched(scope, is_off=False, reason=row.reason))
    return _switch(row)


def switches(conn: Connection, history: bool = False) -> list[DraftSwitch]:
    query = select(*Table.__table__.c).order_by(Table.id)
    if not history:
        query = query.where(Table.on_at.is_(None))
    return [_switch(row) for row in conn.execute(query)]


def _log(conn: Connection, now: Now, scope: SwitchScope, payload: Mapping[str, Any]) -> None:
    """Say so in the logs of the live jobs that it concerns, in one order everywhere."""
    query = select(Job.job_id).where(job_is_live()).order_by(Job.job_id)
    for column, wanted in ((Job.tenant, scope.tenant), (Job.name, scope.job_name)):
        query = query.where(column == wanted) if wanted else query
    for job_id in conn.scalars(query).all():
        jobs.note_action(conn, now, job_id, EntryKind.DRAFTING, payload)


def _is_active(scope: SwitchScope) -> Sequence[ColumnElement[bool]]:
    of_scope = [getattr(Table, name) == value for name, value in asdict(scope).items()]
    return [*of_scope, Table.on_at.is_(None)]


def _switch(row: Row[Any]) -> DraftSwitch:
    scope = SwitchScope(row.tenant, row.job_name, row.tag, row.proposer)
    return DraftSwitch(scope, row.off_at, row.off_by, row.reason, row.on_at, row.on_by)
