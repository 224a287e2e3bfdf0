"""Rollouts in SQL: groups are added, and the newest one may decide.

Each change is one transaction that holds the rollout's row, so groups that end at once are judged
one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, select, update
from sqlalchemy.sql import Select

from specbatch.pipeline.ledger.sql import audit_log, registry
from specbatch.pipeline.ledger.sql.transactions import Now, upsert
from specbatch.pipeline.policy.rollout import state_of
from specbatch.schemas.errors import UsageError
from specbatch.schemas.masking import masked
from specbatch.schemas.registry import DeployScope
from specbatch.schemas.rollouts import Observed, Outcome, Rollout
from specbatch.schemas.tables import Rollout as Table
from specbatch.schemas.tables import RolloutGroup

_FIGURES = Observed.__slots__


def begin(
    conn: Connection,
    now: Now,
    fingerprint: str,
    scope: DeployScope,
    steps: Sequence[float],
    reason: str,
) -> Rollout:
    """Raises `UsageError` where there is nothing to compare with, or a rollout already."""
    registry.alone(conn)
    version = registry.locked(conn, fingerprint)
    present = registry.present(registry.deployments(conn), scope)
    if present is None:
        raise UsageError(
            f"no model is deployed for {scope.words}, so there is nothing to compare "
            f"{version.label} with: promote it with `specbatch models promote {version.label} "
            "--reason WHY`"
        )
    if present.fingerprint == fingerprint:
        raise UsageError(f"{version.label} drafts for {scope.words} already")
    values = {
        **registry.columns_of(scope),
        "fingerprint": fingerprint,
        "present": present.fingerprint,
        "steps": list(steps),
        "step": 0,
        "better": 1.0,
        "worse": 1.0,
        "started_at": now,
        "started_by": audit_log.actor_of(conn),
        "reason": masked(reason),
    }
    adding = upsert(conn.dialect.name, Table).values(**values).on_conflict_do_nothing()
    row = conn.execute(adding.returning(*Table.__table__.c)).first()
    if row is None:
        raise UsageError(
            f"there is a rollout for {scope.words} already: see `specbatch rollout list`, and stop "
            "it first"
        )
    return _rollout(row)


def rollouts(conn: Connection, history: bool = False) -> list[Rollout]:
    """Those that count now, with `history` all there were, in the order they began."""
    query = select(*Table.__table__.c).order_by(Table.id)
    if not history:
        query = query.where(Table.ended_at.is_(None))
    return [_rollout(row) for row in conn.execute(query)]


def groups(conn: Connection, number: int) -> list[Observed]:
    """Of a rollout, in the order in which they ended."""
    columns = (getattr(RolloutGroup, name) for name in _FIGURES)
    query = select(*columns).where(RolloutGroup.rollout_id == number).order_by(RolloutGroup.id)
    return [Observed(*row) for row in conn.execute(query)]


def observe(
    conn: Connection, now: Now, number: int, job_id: str, group_index: int, seen: Observed
) -> Rollout:
    """Add a group, once, and let the rollout continue or end as its groups say."""
    row = conn.execute(_of(number).with_for_update()).one()
    if row.outcome is not None:  # the group was on its way when the rollout was decided
        return _rollout(row)
    key = {"rollout_id": number, "job_id": job_id, "group_index": group_index}
    adding = upsert(conn.dialect.name, RolloutGroup).values(**key, **asdict(seen))
    adding = adding.on_conflict_do_nothing().returning(RolloutGroup.id)
    if conn.execute(adding).first() is None:
        return _rollout(row)
    same_cost = registry.have_same_config(conn, row.fingerprint, row.present)
    state = state_of(row.steps, groups(conn, number), same_cost)
    values: dict[str, Any] = {"step": state.step, "better": state.better, "worse": state.worse}
    if state.outcome is not None:
        values["outcome"] = state.outcome.value
        if state.outcome is not Outcome.BETTER:  # a better one drafts on until it is promoted
            values |= {"ended_at": now, "ended_by": audit_log.actor_of(conn)}
    return _changed(conn, Table.id == number, values)


def stop(conn: Connection, now: Now, scope: DeployScope, reason: str) -> Rollout:
    """The candidate drafts no more. Raises `UsageError` where there is no rollout."""
    row = conn.execute(select(*Table.__table__.c).where(*_live(scope)).with_for_update()).first()
    if row is None:
        raise UsageError(f"there is no rollout for {scope.words}: see `specbatch rollout list`")
    return _end(conn, now, row, Outcome.STOPPED, reason)


def settle(conn: Connection, now: Now) -> list[Rollout]:
    """Promote the candidates that are better; those that could not be are stopped, and those that
    were compared with what drafts no more. Those that were worse are retired, so that their name
    does not lead to them."""
    registry.retire_the_worse(conn, now)
    waiting = [Table.ended_at.is_(None), Table.outcome == Outcome.BETTER.value]
    which = select(Table.id).where(*waiting).order_by(Table.id)
    if not registry.stale_rollouts(conn) and conn.execute(which).first() is None:
        return []
    registry.alone(conn)
    why = "the model that it was compared with serves no more"
    stopped = registry.stop_stale_rollouts(conn, now, why)
    settled = [_rollout(conn.execute(_of(number)).one()) for number in stopped]
    for number in conn.execute(which).scalars().all():
        row = conn.execute(_of(number).where(*waiting).with_for_update()).first()
        if row is None:  # somebody has ended it, or the promotion before this one did
            continue
        scope = _scope(row)
        reason = f"rollout {row.id}: better, the bet on it has grown {row.better:,.0f}-fold"
        try:
            registry.locked(conn, row.fingerprint)
        except UsageError as error:  # nothing is written yet
            settled.append(_end(conn, now, row, Outcome.STOPPED, str(error)))
            continue
        registry.promote(conn, now, row.fingerprint, scope, reason)
        settled.append(_end(conn, now, row, Outcome.BETTER, reason))
    return settled


def _end(conn: Connection, now: Now, row: Row[Any], outcome: Outcome, reason: str) -> Rollout:
    values = {"outcome": outcome.value, "end_reason": masked(reason)}
    ended = {"ended_at": now, "ended_by": audit_log.actor_of(conn)}
    return _changed(conn, Table.id == row.id, {**values, **ended})


def _changed(conn: Connection, which: ColumnElement[bool], values: dict[str, Any]) -> Rollout:
    changing = update(Table).where(which).values(**values).returning(*Table.__table__.c)
    return _rollout(conn.execute(changing).one())


def _of(number: int) -> Select[Any]:
    return select(*Table.__table__.c).where(Table.id == number)


def _live(scope: DeployScope) -> list[ColumnElement[bool]]:
    of_scope = [getattr(Table, name) == value for name, value in registry.columns_of(scope).items()]
    return [*of_scope, Table.ended_at.is_(None)]


def _scope(row: Row[Any]) -> DeployScope:
    return DeployScope(row.tenant, row.job_name, row.tag)


def _rollout(row: Row[Any]) -> Rollout:
    outcome = None if row.outcome is None else Outcome(row.outcome)
    return Rollout(
        row.id,
        row.fingerprint,
        _scope(row),
        row.present,
        tuple(row.steps),
        row.step,
        row.started_at,
        row.started_by,
        row.reason,
        row.better,
        row.worse,
        outcome,
        row.ended_at,
        row.ended_by,
        row.end_reason,
    )
