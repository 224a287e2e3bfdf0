"""Claims the next group in fair-share order, in three statements: who waits, the claim, its cost.

`fair_share` has the order. Groups that another claimer is about to take are skipped, and so are
those that a budget of their tenant does not cover, which takes a few statements more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from sqlalchemy import (
    BindParameter,
    Connection,
    Double,
    Executable,
    Select,
    bindparam,
    case,
    func,
    literal,
    select,
)

from specbatch.pipeline.ledger import fair_share, rules
from specbatch.pipeline.ledger.fair_share import Waiting
from specbatch.pipeline.ledger.sql import budgets, leases, pinning, residency
from specbatch.pipeline.ledger.sql.leases import Claimer
from specbatch.pipeline.ledger.sql.transactions import Now, upsert
from specbatch.schemas.numeric_class import Pinned
from specbatch.schemas.records import GroupWork, Stage
from specbatch.schemas.tables import Group, Job, Tenant, group_is_open, job_is_live

_ROUNDS = 3  # reads of who waits; others may have taken every group of the first
_JOBS_TRIED = 8  # in each round
_LONGEST = (Group.prompt_tokens.desc(), Group.group_index)
_MOST_TOKENS = Job.spec[("sampling", "max_tokens")].as_integer()
_SAMPLES = Job.spec[("sampling", "n")].as_integer()


def claim_next(
    conn: Connection,
    now: Now,
    claimer: Claimer,
    model: str,
    weights: Mapping[str, float],
    jobs: Collection[str] | None = None,
) -> GroupWork | None:
    """Claim the longest group of the next job; None when nothing can be claimed.

    `jobs`: of no other jobs than these. Raises `UnpinnedError` and `MovedError`.
    """
    serves, may_claim = claimer.serves, partial(leases.may_claim, now, claimer)
    if claimer.stage not in rules.CANCELLABLE:
        return None
    rooms: Mapping[str, int | None] = {}
    for _ in range(_ROUNDS):
        waiting = _waiting(conn, now, claimer, model)
        wanted = waiting if jobs is None else [job for job in waiting if job.job_id in jobs]
        due = fair_share.by_turn(budgets.affordable(conn, now, wanted, may_claim))
        if not due:
            return None
        tried = due[:_JOBS_TRIED]
        limited = {job.tenant for job in tried if job.is_budgeted}
        # Once for all: two claims that took one lock after the other could wait for each other.
        rooms = rooms or budgets.rooms_to_claim(conn, now, limited)
        for job in tried:
            if job.is_budgeted and job.tenant not in rooms:
                continue  # it came later, and the next claim takes its lock
            # One statement, so exactly one claimer wins the group.
            room = rooms.get(job.tenant)
            claim = _longest_claim(now, claimer, is_limited=room is not None)
            parameters = {"of_job": job.job_id, **({} if room is None else {"of_room": room})}
            work = leases.taken(conn, claim, claimer.max_attempts, parameters)
            if work is not None:
                weight = weights.get(job.tenant, fair_share.DEFAULT_WEIGHT)
                pinned = _charge(conn, job, work, fair_share.floor_of(job, waiting), weight)
                if serves is None:
                    return work
                pinning.check(serves, job.job_id, pinned)
                return replace(work, **pinned._asdict())
    return None


def _waiting(conn: Connection, now: Now, claimer: Claimer, model: str) -> list[Waiting]:
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
            fair_share.tokens_per_row(row.max_tokens, row.samples),
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
            _MOST_TOKENS.label("max_tokens"),
            _SAMPLES.label("samples"),
            is_budgeted.label("is_budgeted"),
        )
        .outerjoin(Tenant, Tenant.tenant == Job.tenant)
        .where(job_is_live(), named == model, ~Job.cancel_requested)
        .where(*pinning.served(claimer.serves), *residency.placed(claimer.site))
    )


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
    return leases.taking(now, claimer, *which)


def _charge(conn: Connection, job: Waiting, work: GroupWork, floor: float, weight: float) -> Pinned:
    """Advance the tenant's virtual time in its row, whatever was read of it before.

    Returns what the job has pinned, which costs no statement here.
    """
    cost = fair_share.cost_of(work.rows, work.prompt_tokens, job.tokens_per_row, weight)
    parameters = {
        "of_job": job.job_id,
        "of_tenant": job.tenant,
        "new_weight": weight,
        "floor": floor,
        "cost": cost,
        "first": floor + cost,
    }
    return Pinned(*conn.execute(_charging(conn.dialect.name), parameters).one())


@lru_cache(maxsize=2)
def _charging(dialect: str) -> Executable:
    floor = bindparam("floor", type_=Double)
    start = case((Tenant.served > floor, Tenant.served), else_=floor)
    values = {
        "tenant": bindparam("of_tenant"),
        "weight": bindparam("new_weight"),
        "started": floor,
        "served": bindparam("first"),
    }
    known = {
        "weight": bindparam("new_weight"),
        "started": start,
        "served": start + bindparam("cost", type_=Double),
    }
    made: Executable = (
        upsert(dialect, Tenant)
        .values(**values)
        .on_conflict_do_update(index_elements=[Tenant.tenant], set_=known)
        .returning(*pinning.pinned_columns())
    )
    return made
