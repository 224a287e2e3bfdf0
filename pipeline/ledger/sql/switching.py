"""Drafting switched off by an operator: one row per switch, which says who, when and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, select, update

from specbatch.pipeline.ledger.sql import audit_log
from specbatch.pipeline.ledger.sql.transactions import Now, upsert
from specbatch.schemas.draft_switches import DraftSwitch, SwitchScope
from specbatch.schemas.masking import masked
from specbatch.schemas.tables import DraftSwitch as Table


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
    return _switch(row), True


def switch_on(conn: Connection, now: Now, scope: SwitchScope) -> DraftSwitch | None:
    values = {"on_at": now, "on_by": audit_log.actor_of(conn)}
    ended = update(Table).where(*_is_active(scope)).values(**values)
    row = conn.execute(ended.returning(*Table.__table__.c)).first()
    if row is None:
        return None
    return _switch(row)


def switches(conn: Connection, history: bool = False) -> list[DraftSwitch]:
    query = select(*Table.__table__.c).order_by(Table.id)
    if not history:
        query = query.where(Table.on_at.is_(None))
    return [_switch(row) for row in conn.execute(query)]


def _is_active(scope: SwitchScope) -> Sequence[ColumnElement[bool]]:
    of_scope = [getattr(Table, name) == value for name, value in asdict(scope).items()]
    return [*of_scope, Table.on_at.is_(None)]


def _switch(row: Row[Any]) -> DraftSwitch:
    scope = SwitchScope(row.tenant, row.job_name, row.tag, row.proposer)
    return DraftSwitch(scope, row.off_at, row.off_by, row.reason, row.on_at, row.on_by)
