"""The model registry in SQL: versions by name, and deployments, which are only begun and ended.

Each change is one transaction: a process that dies in it leaves what was before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, func, select, update

from specbatch.pipeline.ledger.sql import audit_log
from specbatch.pipeline.ledger.sql.transactions import Now, upsert
from specbatch.schemas.errors import UsageError
from specbatch.schemas.masking import masked
from specbatch.schemas.registry import (
    Deployment,
    DeployScope,
    ModelVersion,
    NewModel,
    PairTrial,
)
from specbatch.schemas.rollouts import Outcome
from specbatch.schemas.tables import Deployment as DeploymentTable
from specbatch.schemas.tables import Model as ModelTable
from specbatch.schemas.tables import PairTrial as PairTrialTable
from specbatch.schemas.tables import Rollout as RolloutTable

_LOCK_ID = 0x5BEC_0A1E  # of `alone`; any number that migrations do not lock
_TRIES = 8  # to get a version number, while others take some


def add_model(conn: Connection, now: Now, model: NewModel) -> tuple[ModelVersion, bool]:
    """The version, and whether it is new: files are registered once."""
    newest = select(func.coalesce(func.max(ModelTable.version), 0) + 1)
    values = {
        "fingerprint": model.fingerprint,
        "name": model.name,
        "version": newest.where(ModelTable.name == model.name).scalar_subquery(),
        "ref": model.ref,
        "parent": model.parent,
        "origin": dict(model.origin),
        "added_at": now,
        "added_by": audit_log.actor_of(conn),
    }
    adding = upsert(conn.dialect.name, ModelTable).values(**values).on_conflict_do_nothing()
    for _ in range(_TRIES):
        row = conn.execute(adding.returning(*ModelTable.__table__.c)).first()
        if row is not None:
            return _version(row), True
        there = select(*ModelTable.__table__.c).where(ModelTable.fingerprint == model.fingerprint)
        row = conn.execute(there).first()
        if row is not None:
            return _version(row), False
    raise UsageError(f"others are adding versions of {model.name}: try again")


def models(conn: Connection) -> list[ModelVersion]:
    """By name and version."""
    query = select(*ModelTable.__table__.c).order_by(ModelTable.name, ModelTable.version)
    return [_version(row) for row in conn.execute(query)]


def add_pair_trial(conn: Connection, now: Now, trial: PairTrial) -> PairTrial:
    """The newest verdict counts."""
    key = {name: getattr(trial, name) for name in ("verifier", "proposer", "numeric_class")}
    said = {
        "pays": trial.pays,
        "reason": masked(trial.reason),
        "figures": dict(trial.figures),
        "tried_at": now,
        "tried_by": audit_log.actor_of(conn),
    }
    adding = upsert(conn.dialect.name, PairTrialTable).values(**key, **said)
    adding = adding.on_conflict_do_update(index_elements=list(key), set_=said)
    return _pair_trial(conn.execute(adding.returning(*PairTrialTable.__table__.c)).one())


def pair_trials(conn: Connection) -> list[PairTrial]:
    """Of all pairs, the oldest first."""
    query = select(*PairTrialTable.__table__.c).order_by(PairTrialTable.tried_at)
    return [_pair_trial(row) for row in conn.execute(query)]


def deployments(conn: Connection, history: bool = False) -> list[Deployment]:
    """Those of now, with `history` all there were, in the order they began."""
    query = select(*DeploymentTable.__table__.c).order_by(DeploymentTable.id)
    if not history:
        query = query.where(DeploymentTable.ended_at.is_(None))
    return [_deployment(row) for row in conn.execute(query)]


def promote(
    conn: Connection, now: Now, fingerprint: str, scope: DeployScope, reason: str
) -> Deployment:
    """The model drafts for the scope from now on; the one before it does no more."""
    alone(conn)
    locked(conn, fingerprint)
    _end(conn, now, scope)
    begun = _begin(conn, now, fingerprint, scope, reason)
    stop_stale_rollouts(conn, now, f"promoted: {reason}")
    return begun


def alone(conn: Connection) -> None:
    """No other transaction changes deployments and rollouts until this one ends.

    Taken before any row, so what is read next is so, and nobody waits in a ring. SQLite has one
    writer at a time.
    """
    if conn.dialect.name == "postgresql":
        conn.exec_driver_sql("SELECT pg_advisory_xact_lock(%s)", (_LOCK_ID,))


def roll_back(conn: Connection, now: Now, scope: DeployScope, reason: str) -> Deployment | None:
    """The model before the present one drafts again; None: there was none, so wider scopes count.

    What a rollback has ended is not brought back by a later one. Raises `UsageError` where no model
    is deployed.
    """
    alone(conn)
    live = select(*DeploymentTable.__table__.c).where(
        *_of(scope), DeploymentTable.ended_at.is_(None)
    )
    present = conn.execute(live).first()
    if present is None:
        raise UsageError(f"no model is deployed for {scope.words}: see `specbatch models list`")
    earlier = (
        select(*DeploymentTable.__table__.c)
        .join(ModelTable, ModelTable.fingerprint == DeploymentTable.fingerprint)
        .where(
            *_of(scope),
            DeploymentTable.id < _place(present),
            DeploymentTable.fingerprint != present.fingerprint,
            DeploymentTable.end_reason.is_(None),
            ModelTable.retired_at.is_(None),
        )
        .order_by(DeploymentTable.id.desc())
        .limit(1)
    )
    before = conn.execute(earlier).first()
    if before is not None:
        locked(conn, before.fingerprint)
    _end(conn, now, scope, reason)
    begun = None
    if before is not None:
        begun = _begin(conn, now, before.fingerprint, scope, reason, restores=_place(before))
    stop_stale_rollouts(conn, now, f"rolled back: {reason}")
    return begun


def _place(row: Row[Any]) -> int:
    """Where a deployment stands in the history: one that was brought back, where it stood first."""
    return int(row.id if row.restores is None else row.restores)


def retire(conn: Connection, now: Now, fingerprint: str) -> ModelVersion:
    """It cannot be promoted any more. Raises `UsageError` while it is deployed."""
    version = locked(conn, fingerprint)
    live = [one for one in deployments(conn) if one.fingerprint == fingerprint]
    if live:
        raise UsageError(
            f"{version.label} drafts for {live[0].scope.words}: promote another model there or "
            "roll it back first"
        )
    if _is_tried(conn, fingerprint):
        raise UsageError(f"{version.label} is in a rollout: stop it with `specbatch rollout stop`")
    retired = (
        update(ModelTable)
        .where(ModelTable.fingerprint == fingerprint)
        .values(retired_at=now, retired_by=audit_log.actor_of(conn))
    )
    return _version(conn.execute(retired.returning(*ModelTable.__table__.c)).one())


def locked(conn: Connection, fingerprint: str) -> ModelVersion:
    """A model that may be promoted; it cannot be retired before the transaction ends."""
    query = select(*ModelTable.__table__.c).where(ModelTable.fingerprint == fingerprint)
    row = conn.execute(query.with_for_update()).first()
    if row is None:
        raise UsageError(
            f"no model with fingerprint {fingerprint[:12]} is registered: add it with "
            "`specbatch models add NAME FOLDER`"
        )
    version = _version(row)
    if version.retired_at is not None:
        raise UsageError(
            f"{version.label} was retired by {version.retired_by}: choose another version"
        )
    return version


def have_same_config(conn: Connection, one: str, other: str) -> bool:
    """Whether two models differ by their weights alone; not, if that was not recorded."""
    query = select(*ModelTable.__table__.c).where(ModelTable.fingerprint.in_([one, other]))
    found = [_version(row) for row in conn.execute(query)]
    return len(found) == 2 and found[0].costs_like(found[1])


def _end(conn: Connection, now: Now, scope: DeployScope, reason: str | None = None) -> None:
    """`reason`: of a rollback; who promotes another model gives it there."""
    ended = {"ended_at": now, "ended_by": audit_log.actor_of(conn), "end_reason": reason}
    if reason is not None:
        ended["end_reason"] = masked(reason)
    there = update(DeploymentTable).where(*_of(scope), DeploymentTable.ended_at.is_(None))
    conn.execute(there.values(**ended))


def present(live: Iterable[Deployment], scope: DeployScope) -> Deployment | None:
    """Of what is deployed now, that which drafts for all of a scope."""
    covering = [one for one in live if one.scope.covers(scope)]
    return max(covering, key=lambda one: one.scope.narrowness, default=None)


def stale_rollouts(conn: Connection) -> list[int]:
    """Those whose groups are compared with a model that drafts for the scope no more."""
    query = select(*RolloutTable.__table__.c).where(RolloutTable.ended_at.is_(None))
    live = deployments(conn)
    found = []
    for row in conn.execute(query):
        serving = present(live, DeployScope(row.tenant, row.job_name, row.tag))
        if serving is None or serving.fingerprint != row.present:
            found.append(row.id)
    return found


def stop_stale_rollouts(conn: Connection, now: Now, reason: str) -> list[int]:
    """After `alone`; returns their numbers."""
    ended = {"ended_at": now, "ended_by": audit_log.actor_of(conn)}
    said = {"outcome": Outcome.STOPPED.value, "end_reason": masked(reason)}
    stopping = update(RolloutTable).where(
        RolloutTable.id.in_(stale_rollouts(conn)),
        RolloutTable.ended_at.is_(None),  # a group or an operator may have ended one meanwhile
    )
    stopped = conn.execute(stopping.values(**ended, **said).returning(RolloutTable.id))
    return sorted(stopped.scalars())


def retire_the_worse(conn: Connection, now: Now) -> None:
    """Candidates that were found worse, and draft for nobody."""
    worse = select(RolloutTable.fingerprint).where(RolloutTable.outcome == Outcome.WORSE.value)
    tried = select(RolloutTable.fingerprint).where(RolloutTable.ended_at.is_(None))
    serving = select(DeploymentTable.fingerprint).where(DeploymentTable.ended_at.is_(None))
    waiting = [
        ModelTable.retired_at.is_(None),
        ModelTable.fingerprint.in_(worse),
        ModelTable.fingerprint.not_in(serving),
        ModelTable.fingerprint.not_in(tried),
    ]
    which = select(ModelTable.fingerprint).where(*waiting).order_by(ModelTable.fingerprint)
    if conn.execute(which).first() is None:  # a role that may not retire has nothing to do here
        return
    alone(conn)
    conn.execute(which.with_for_update()).all()
    retiring = update(ModelTable).where(*waiting)
    conn.execute(retiring.values(retired_at=now, retired_by=audit_log.actor_of(conn)))


def _is_tried(conn: Connection, fingerprint: str) -> bool:
    tried = select(RolloutTable.id).where(
        RolloutTable.fingerprint == fingerprint, RolloutTable.ended_at.is_(None)
    )
    return conn.execute(tried).first() is not None


def _begin(
    conn: Connection,
    now: Now,
    fingerprint: str,
    scope: DeployScope,
    reason: str,
    restores: int | None = None,
) -> Deployment:
    values = {
        **columns_of(scope),
        "fingerprint": fingerprint,
        "started_at": now,
        "started_by": audit_log.actor_of(conn),
        "reason": masked(reason),
        "restores": restores,
    }
    adding = upsert(conn.dialect.name, DeploymentTable).values(**values).on_conflict_do_nothing()
    row = conn.execute(adding.returning(*DeploymentTable.__table__.c)).first()
    if row is None:  # of two callers at once; this one's transaction is taken back
        raise UsageError(
            f"somebody else has just promoted a model for {scope.words}: look at "
            "`specbatch models list`, and do it again if it is still wanted"
        )
    return _deployment(row)


def columns_of(scope: DeployScope) -> dict[str, str]:
    return {"tenant": scope.tenant, "job_name": scope.job_name, "tag": scope.tag}


def _of(scope: DeployScope) -> list[ColumnElement[bool]]:
    return [getattr(DeploymentTable, name) == value for name, value in columns_of(scope).items()]


def _version(row: Row[Any]) -> ModelVersion:
    return ModelVersion(**{name: getattr(row, name) for name in ModelVersion.__slots__})


def _pair_trial(row: Row[Any]) -> PairTrial:
    return PairTrial(**{name: getattr(row, name) for name in PairTrial.__slots__})


def _deployment(row: Row[Any]) -> Deployment:
    return Deployment(
        row.id,
        row.fingerprint,
        DeployScope(row.tenant, row.job_name, row.tag),
        row.started_at,
        row.started_by,
        row.reason,
        row.ended_at,
        row.ended_by,
        row.end_reason,
    )
