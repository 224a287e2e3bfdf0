"""Claims the next group in fair-share order, in three statements: who waits, the claim, its cost.

`fair_share` has the order. Groups that another claimer is about to take are skipped, and so are
those that a budget of their tenant does not cover, which takes a few statements more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Executable,
    Select,
    bindparam,
    func,
    literal,
    select,
)

from specbatch.pipeline.ledger import fair_share, rules
from specbatch.pipeline.ledger.fair_share import Waiting
from specbatch.pipeline.ledger.sql import budgets, leases, pinning, shares
from specbatch.pipeline.ledger.sql.leases import Claimer
from specbatch.pipeline.ledger.sql.transactions import Now
from specbatch.schemas.records import GroupWork, Stage
from specbatch.schemas.tables import Group, Job, Tenant, group_is_open, job_is_live

_ROUNDS = 3  # reads of who waits; others may have taken every group of the first
_JOBS_TRIED = 8  # in each round
_LONGEST = (Group.prompt_tokens.desc(), Group.group_index)


def claim_next(
    conn: Connection,
    now: Now,
    claimer: Claimer,
    model: str,
    weights: Mapping[str, float],
) -> GroupWork | None:
    """Claim the longest group of the next job; None when nothing can be claimed.

    Raises `UnpinnedError` and `MovedError`.
    """
    serves, may_claim = claimer.serves, partial(leases.may_claim, now, claimer)
    if claimer.stage not in rules.CANCELLABLE:
        return None
    for _ in range(_ROUNDS):
        waiting = _waiting(conn, now, claimer, model, weights)
        due = fair_share.by_turn(budgets.affordable(conn, now, waiting, may_claim))
        if not due:
            return None
        for turn in due[:_JOBS_TRIED]:
            job = turn.job
            # One statement, so exactly one claimer wins the group.
            room = budgets.room_to_claim(conn, now, job.tenant) if job.is_budgeted else None
            claim = _longest_claim(now, claimer, is_limited=room is not None)
            parameters: dict[str, Any] = {"of_job": job.job_id, shares.RATE: turn.sec_per_token}
            parameters |= {} if room is None else {"of_room": room}
            work = leases.taken(conn, claim, claimer.max_attempts, parameters)
            if work is not None:
                assert work.lease.group_index is not None, "a group was claimed"
                pinned = shares.charge(conn, turn, work.lease.group_index)
                if serves is None:
                    return work
                pinning.check(serves, job.job_id, pinned)
                return replace(work, **pinned._asdict())
    return None


def _waiting(
    conn: Connection, now: Now, claimer: Claimer, model: str, weights: Mapping[str, float]
) -> list[Waiting]:
    """Live jobs of the model and a served class with open groups at the stage."""
    rows = conn.execute(_waiting_query(now, claimer, model))
    return [
        Waiting(
            row.job_id,
            row.tenant,
            row.priority,
            row.created_at,
            row.a_due_one is not None,
            row.served,
            row.started,
            row.credit,
            row.sec_per_token,
            weights.get(row.tenant, fair_share.DEFAULT_WEIGHT),
            row.deadline_at,
            bool(row.is_urgent),
            bool(row.is_budgeted),
        )
        for row in rows
        if row.an_open_one is not None
    ]


@lru_cache(maxsize=16)
def _waiting_query(now: Now, claimer: Claimer, model: str) -> Select[Any]:
    named = Job.verifier if claimer.stage is Stage.VERIFY else Job.proposer
    # The one stage comes first: SQLite takes the first for the index, and else sorts what it finds.
    there = (Group.job_id == Job.job_id, Group.stage == claimer.stage.value, group_is_open())
    # The first of them by the index, for each job: of EXISTS, PostgreSQL would make a join with all
    # groups, and in any order it would go through the table until it meets one.
    an_open_one = select(Group.group_index).where(*there).order_by(*_LONGEST).limit(1)
    a_due_one = an_open_one.where(*leases.may_claim(now, claimer))
    is_budgeted = budgets.is_budgeted(Job.tenant) if named is Job.verifier else literal(False)
    return (
        select(
            Job.job_id,
            Job.tenant,
            Job.priority,
            Job.created_at,
            an_open_one.correlate(Job).scalar_subquery().label("an_open_one"),
            a_due_one.correlate(Job).scalar_subquery().label("a_due_one"),
            func.coalesce(Tenant.served, 0.0).label("served"),
            func.coalesce(Tenant.started, 0.0).label("started"),
            func.coalesce(Tenant.credit, 0.0).label("credit"),
            func.coalesce(Tenant.sec_per_token, 0.0).label("sec_per_token"),
            Job.deadline_at,
            _is_urgent(now).label("is_urgent"),
            is_budgeted.label("is_budgeted"),
        )
        .outerjoin(Tenant, Tenant.tenant == Job.tenant)
        .where(job_is_live(), named == model, ~Job.cancel_requested)
        .where(*pinning.served(claimer.serves))
    )


def _is_urgent(now: Now) -> ColumnElement[bool]:
    """Whether less than half of the time to the job's deadline is left; NULL: it has none."""
    return (Job.deadline_at - now) * 2 < Job.deadline_at - Job.created_at


@lru_cache(maxsize=16)
def _longest_claim(now: Now, claimer: Claimer, is_limited: bool = False) -> Executable:
    """The claim of the job's longest free group, of at most `of_room` tokens. Cached as well."""
    job: BindParameter[str] = bindparam("of_job")
    # That a group is open is spelled out for the index.
    free = (Group.job_id == job, *leases.may_claim(now, claimer), group_is_open())
    free += (budgets.fits(bindparam("of_room")),) if is_limited else ()
    longest = (
        select(Group.group_index)
        .where(*free)
        .order_by(*_LONGEST)
        .limit(1)
        .with_for_update(skip_locked=True)
        .correlate(None)
        .scalar_subquery()
    )
    which = (*free, Group.group_index == longest, *pinning.job_is_served(job, claimer.serves))
    return leases.taking(now, claimer, *which, charged_sec=shares.estimate())
