"""Claims the next group in fair-share order, in three statements: who waits, the claim, its cost.

`fair_share` has the order. Groups that another claimer is about to take are skipped, and so are
those that a budget of their tenant does not cover, which takes a few statements more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Executable,
    Select,
    SQLColumnExpression,
    and_,
    bindparam,
    case,
    func,
    literal,
    or_,
    select,
)

from specbatch.pipeline.ledger import fair_share, rules
from specbatch.pipeline.ledger.fair_share import Turn, Waiting
from specbatch.pipeline.ledger.sql import budgets, leases, pinning, residency, shares
from specbatch.pipeline.ledger.sql.leases import Claimer
from specbatch.pipeline.ledger.sql.transactions import Now, in_parts
from specbatch.schemas.records import GroupWork, Stage
from specbatch.schemas.serving import BatchPhase
from specbatch.schemas.serving_tables import Batch
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
        waiting = _waiting(conn, now, claimer, model, weights)
        due = [
            turn
            for turn in fair_share.by_turn(budgets.affordable(conn, now, waiting, may_claim))
            if (serves is None or serves.works_on(turn.job.job_id))
            and (jobs is None or turn.job.job_id in jobs)
        ]
        if not due:
            return None
        tried = due[:_JOBS_TRIED]
        limited = {turn.job.tenant for turn in tried if turn.job.is_budgeted}
        # Once for all: two claims that took one lock after the other could wait for each other.
        rooms = rooms or budgets.rooms_to_claim(conn, now, limited)
        for turn in tried:
            job = turn.job
            if job.is_budgeted and job.tenant not in rooms:
                continue  # it came later, and the next claim takes its lock
            # One statement, so exactly one claimer wins the group.
            room = rooms.get(job.tenant)
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


def in_turn(
    conn: Connection,
    now: Now,
    job_ids: Sequence[str],
    weights: Mapping[str, float],
    running: str | None = None,
) -> list[Turn]:
    """These jobs in fair-share order, whatever is to be done for them. Of job `running` also what
    its groups under way are charged with."""
    query = select(
        *_facts(now),
        literal(False).label("is_budgeted"),
        case((Job.job_id == running, _under_way_sec(now)), else_=0.0).label("under_way_sec"),
    ).outerjoin(Tenant, Tenant.tenant == Job.tenant)
    rows = (
        row for some in in_parts(job_ids) for row in conn.execute(query.where(Job.job_id.in_(some)))
    )
    return fair_share.by_turn(
        [
            replace(_as_waiting(row, True, weights), under_way_sec=float(row.under_way_sec))
            for row in rows
        ]
    )


def _under_way_sec(now: Now) -> ColumnElement[float]:
    """Device seconds that the job's tenant is charged with for groups that are held now."""
    held = (Group.job_id == Job.job_id, group_is_open(), Group.lease_until > now)
    charged = select(func.coalesce(func.sum(Group.charged_sec), 0.0)).where(*held)
    return charged.correlate(Job).scalar_subquery()


def _waiting(
    conn: Connection, now: Now, claimer: Claimer, model: str, weights: Mapping[str, float]
) -> list[Waiting]:
    """Live jobs of the model and a served class with open groups at the stage.

    Of a process that works on one job, also those whose batches wait until it is their turn there.
    """
    found = []
    for row in conn.execute(_waiting_query(now, claimer, model)):
        is_mine = claimer.serves is None or claimer.serves.works_on(row.job_id)
        if not is_mine or row.an_open_one is not None:
            is_due = not is_mine or row.a_due_one is not None
            found.append(_as_waiting(row, is_due, weights))
    return found


def _as_waiting(row: Any, is_due: bool, weights: Mapping[str, float]) -> Waiting:
    return Waiting(
        row.job_id,
        row.tenant,
        row.priority,
        row.created_at,
        is_due,
        row.served,
        row.started,
        row.credit,
        row.sec_per_token,
        weights.get(row.tenant, fair_share.DEFAULT_WEIGHT),
        row.deadline_at,
        bool(row.is_urgent),
        bool(row.is_budgeted),
    )


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
    which = and_(named == model, *pinning.served(claimer.serves))
    if claimer.serves is not None and claimer.serves.only_job is not None:
        which = or_(which, _of_a_batch_in_line())
    return (
        select(
            *_facts(now),
            an_open_one.correlate(Job).scalar_subquery().label("an_open_one"),
            a_due_one.correlate(Job).scalar_subquery().label("a_due_one"),
            is_budgeted.label("is_budgeted"),
        )
        .outerjoin(Tenant, Tenant.tenant == Job.tenant)
        .where(job_is_live(), ~Job.cancel_requested, which, *residency.placed(claimer.site))
    )


def _facts(now: Now) -> list[SQLColumnExpression[Any]]:
    """Of a job and its tenant, what the order follows from."""
    of_tenant = (Tenant.served, Tenant.started, Tenant.credit, Tenant.sec_per_token)
    # Whether less than half of the time to its deadline is left; NULL: it has none.
    is_urgent = (Job.deadline_at - now) * 2 < Job.deadline_at - Job.created_at
    return [
        *(Job.job_id, Job.tenant, Job.priority, Job.created_at, Job.deadline_at),
        *(func.coalesce(column, 0.0).label(column.key) for column in of_tenant),
        is_urgent.label("is_urgent"),
    ]


def _of_a_batch_in_line() -> ColumnElement[bool]:
    """Whether the job's batch is open and waits for nothing but its turn."""
    in_line = (Batch.phase != BatchPhase.ENDED.value, Batch.waits_because.is_(None))
    return select(Batch.batch_id).where(Batch.job_id == Job.job_id, *in_line).exists()


@lru_cache(maxsize=16)
def _longest_claim(now: Now, claimer: Claimer, is_limited: bool) -> Executable:
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
