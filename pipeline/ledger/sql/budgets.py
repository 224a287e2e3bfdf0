"""Budgets of tenants: what is set, booked and reserved, and which jobs they hold back.

`budget_rules` says what is covered. What is reserved is not counted up and down: it is the sum over
the groups that may still be recorded, so no path that ends a group can forget it.

Of several claims of a tenant with a budget each waits for the one before (`lock`), and takes this
lock before that of any job or group. A claim that may serve several tenants takes all their locks
at once, in one order. Commits do not take it: what they book was reserved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Executable,
    Select,
    and_,
    case,
    exists,
    false,
    func,
    literal,
    or_,
    select,
    text,
    true,
    union_all,
    update,
)

from specbatch.pipeline.ledger import budget_rules
from specbatch.pipeline.ledger.fair_share import Waiting
from specbatch.pipeline.ledger.sql import audit_log
from specbatch.pipeline.ledger.sql.transactions import Now, in_parts, upsert
from specbatch.schemas.budget_tables import TenantBudget, TenantSpending
from specbatch.schemas.budgets import Account, Budget, Period, Shortfall, Spent
from specbatch.schemas.days import DAY_SEC
from specbatch.schemas.errors import OverBudgetError, UsageError
from specbatch.schemas.masking import masked
from specbatch.schemas.records import CompletionRecord, NewJob, Stage
from specbatch.schemas.tables import Group, Job, group_is_open, job_is_due, job_is_live

# In the order of the keys and not of the names: two names may have one key.
_LOCK = text(
    "SELECT pg_advisory_xact_lock(:of_budgets, key) FROM (SELECT DISTINCT hashtext(name) AS key"
    " FROM unnest(CAST(:tenants AS text[])) AS name ORDER BY key) AS keys"
)
_OF_BUDGETS = 1_900_128  # the first key of these locks
_ACTIVE = TenantBudget.ended_at.is_(None)


# --- set, removed, listed -------------------------------------------------------------------


def set_budget(
    conn: Connection,
    now: Now,
    tenant: str,
    period: Period,
    tokens: int | None,
    usd: float | None,
    reason: str,
) -> Budget:
    if tokens is None and usd is None:
        raise UsageError("a budget is of tokens, of dollars or of both: name one")
    remove_budget(conn, now, tenant, period, reason)
    values = {"tenant": tenant, "period": period.value, "tokens": tokens, "usd": usd}
    by = {"set_at": now, "set_by": audit_log.actor_of(conn), "reason": masked(reason)}
    added = upsert(conn.dialect.name, TenantBudget).values(**values, **by)
    return _budget(conn.execute(added.returning(*TenantBudget.__table__.c)).one())


def remove_budget(
    conn: Connection, now: Now, tenant: str, period: Period, reason: str
) -> Budget | None:
    lock(conn, tenant)
    ended = {"ended_at": now, "ended_by": audit_log.actor_of(conn), "end_reason": masked(reason)}
    which = (TenantBudget.tenant == tenant, TenantBudget.period == period.value, _ACTIVE)
    statement = update(TenantBudget).where(*which).values(**ended)
    row = conn.execute(statement.returning(*TenantBudget.__table__.c)).first()
    return None if row is None else _budget(row)


def budgets(conn: Connection, history: bool = False) -> list[Budget]:
    query = select(*TenantBudget.__table__.c).order_by(TenantBudget.id)
    return [_budget(row) for row in conn.execute(query if history else query.where(_ACTIVE))]


def tenant_accounts(conn: Connection, now: Now, tenant: str | None = None) -> list[Account]:
    if tenant is not None:
        return [account(conn, now, tenant)]
    known = {*conn.scalars(select(TenantSpending.tenant).distinct()), *_budgeted(conn)}
    found = accounts(conn, now, known)
    return [found[name] for name in sorted(found)]


def _budget(row: Any) -> Budget:
    return Budget(
        *(row.tenant, Period(row.period), row.tokens, row.usd, row.set_at, row.set_by, row.reason),
        *(row.ended_at, row.ended_by, row.end_reason),
    )


def _budgeted(conn: Connection) -> set[str]:
    """The tenants that have a budget."""
    return set(conn.scalars(select(TenantBudget.tenant).where(_ACTIVE).distinct()))


# --- accounts -------------------------------------------------------------------------------


def is_budgeted(tenant: Any) -> ColumnElement[bool]:
    """Whether this tenant has a budget, in SQL."""
    return select(TenantBudget.id).where(TenantBudget.tenant == tenant, _ACTIVE).exists()


def has_budget(conn: Connection, tenant: str) -> bool:
    return bool(conn.scalar(select(is_budgeted(tenant))))


def lock(conn: Connection, *tenants: str) -> None:
    """Wait for other claims of the tenants. SQLite has one writer at a time.

    One transaction calls it for several tenants once: a second call could wait for somebody who
    waits for the first.
    """
    if conn.dialect.name == "postgresql":
        conn.execute(_LOCK, {"of_budgets": _OF_BUDGETS, "tenants": list(tenants)})


def account(conn: Connection, now: Now, tenant: str) -> Account:
    return accounts(conn, now, [tenant])[tenant]


def accounts(conn: Connection, now: Now, tenants: Collection[str]) -> dict[str, Account]:
    """By name, in as many statements as for one tenant.

    One statement reads what is booked and what is reserved: a commit moves the one to the other.
    What is booked counts from a period's first day on, and has no last one: a commit behind
    midnight may have come between the clock and this reading.
    """
    names = sorted(tenants)
    if not names:
        return {}
    at = audit_log.clock(conn, now)
    of_them = select(*TenantBudget.__table__.c).where(TenantBudget.tenant.in_(names), _ACTIVE)
    held: dict[str, dict[Period, Budget]] = {name: {} for name in names}
    for budget in map(_budget, conn.execute(of_them)):
        held[budget.tenant][budget.period] = budget
    amounts = {row.tenant: row for row in conn.execute(_amounts(names, at))}
    return {name: _account(name, at, held[name], amounts.get(name)) for name in names}


def _account(tenant: str, at: float, held: Mapping[Period, Budget], amounts: Any) -> Account:
    """`amounts`: None where nothing is booked or reserved."""
    in_order = tuple(held[period] for period in Period if period in held)
    if amounts is None:
        return Account(tenant, at, in_order, {period: Spent() for period in Period}, 0)
    spent = {
        one: Spent(int(getattr(amounts, f"{one}_tokens")), float(getattr(amounts, f"{one}_usd")))
        for one in Period
    }
    return Account(tenant, at, in_order, spent, int(amounts.reserved))


def _amounts(tenants: Sequence[str], at: float) -> Select[Any]:
    booked: list[Any] = [TenantSpending.tenant.label("tenant"), literal(0).label("reserved")]
    held: list[Any] = [
        Job.tenant.label("tenant"),
        func.sum(Group.reserved_tokens).label("reserved"),
    ]
    for period in Period:
        in_it = TenantSpending.day >= budget_rules.first_day(period, at)
        for name, column in (("tokens", TenantSpending.tokens), ("usd", TenantSpending.usd)):
            booked.append(func.sum(case((in_it, column), else_=0)).label(f"{period}_{name}"))
            held.append(literal(0).label(f"{period}_{name}"))
    is_held = (Job.tenant.in_(tenants), job_is_live(), group_is_open(), is_reserved())
    both = union_all(
        select(*booked).where(TenantSpending.tenant.in_(tenants)).group_by(TenantSpending.tenant),
        select(*held).join(Job, Job.job_id == Group.job_id).where(*is_held).group_by(Job.tenant),
    ).subquery()
    sums = [func.sum(column).label(column.name) for column in both.c if column.name != "tenant"]
    return select(both.c.tenant, *sums).group_by(both.c.tenant)


def is_reserved() -> ColumnElement[bool]:
    """Whether a group has a reservation: somebody holds it, or its results wait to be recorded.

    An expired lease is one as well. Its holder may still write, until another one claims the group.
    """
    held = and_(Group.stage == Stage.VERIFY.value, Group.lease_owner.is_not(None))
    return or_(Group.stage == Stage.RECORD.value, held)


def bound() -> ColumnElement[int]:
    """The most tokens that a group's unfinished rows can take."""
    by_row = (Group.rows - Group.rows_kept) * Group.most_row_tokens
    return case((by_row < Group.most_tokens, by_row), else_=Group.most_tokens)


def fits(room: Any) -> ColumnElement[bool]:
    """Whether a group may be claimed. What was reserved for it before covers it still."""
    return or_(is_reserved(), bound() <= room)


def book(conn: Connection, at: float, tenant: str, records: Iterable[CompletionRecord]) -> None:
    """Add what completions took to the tenant's day. A copy of an earlier completion is free."""
    computed = [record for record in records if record.reused_from is None]
    if not computed:
        return
    values = {
        "tenant": tenant,
        "day": int(at // DAY_SEC),
        "tokens": sum(record.prompt_tokens + len(record.token_ids) for record in computed),
        "usd": sum(record.cost_usd for record in computed),
    }
    conn.execute(_booking(conn.dialect.name), values)


@lru_cache(maxsize=2)
def _booking(dialect: str) -> Executable:
    """Cached: every commit has it."""
    added = upsert(dialect, TenantSpending)
    made: Executable = added.on_conflict_do_update(
        index_elements=[TenantSpending.tenant, TenantSpending.day],
        set_={
            "tokens": TenantSpending.tokens + added.excluded.tokens,
            "usd": TenantSpending.usd + added.excluded.usd,
        },
    )
    return made


# --- what they hold back --------------------------------------------------------------------


def room_to_claim(conn: Connection, now: Now, tenant: str) -> int | None:
    """The largest bound of a group that may be claimed; None: any.

    Nobody else claims for the tenant from here to the commit.
    """
    return rooms_to_claim(conn, now, {tenant})[tenant]


def rooms_to_claim(
    conn: Connection, now: Now, tenants: Collection[str]
) -> Mapping[str, int | None]:
    """The same of several tenants, by name. A transaction asks once."""
    if not tenants:
        return {}
    lock(conn, *tenants)
    return _rooms(conn, now, tenants)


def _rooms(conn: Connection, now: Now, tenants: Collection[str]) -> dict[str, int | None]:
    found = accounts(conn, now, tenants)
    return {name: budget_rules.room(of_tenant) for name, of_tenant in found.items()}


def affordable(
    conn: Connection,
    now: Now,
    waiting: list[Waiting],
    may_claim: Callable[[], Sequence[ColumnElement[bool]]],
) -> list[Waiting]:
    """The same, where a job is due only if its tenant's budgets cover a group that may be claimed.

    Else the jobs of a tenant without tokens would be tried first, again and again.
    """
    limited = [job for job in waiting if job.is_budgeted and job.is_due]
    if not limited:
        return waiting
    rooms = _rooms(conn, now, {job.tenant for job in limited})
    least = smallest(conn, [job.job_id for job in limited], *may_claim())

    def is_due(job: Waiting) -> bool:
        room = rooms.get(job.tenant)
        return job.is_due and (room is None or least.get(job.job_id, 0) <= room)

    return [replace(job, is_due=is_due(job)) for job in waiting]


def smallest(
    conn: Connection, job_ids: Sequence[str], *which: ColumnElement[bool]
) -> Mapping[str, int]:
    """By job the smallest bound of its groups at VERIFY that meet all conditions; 0 for one that
    has its reservation."""
    least = func.min(case((is_reserved(), 0), else_=bound()))
    found: dict[str, int] = {}
    for some in in_parts(job_ids):
        query = (
            select(Group.job_id, least.label("least"))
            .where(Group.job_id.in_(some), group_is_open(), Group.stage == Stage.VERIFY.value)
            .where(*which)
            .group_by(Group.job_id)
        )
        found |= {row.job_id: int(row.least) for row in conn.execute(query)}
    return found


def shortfalls(
    conn: Connection, now: Now, job_ids: Collection[str] | None = None
) -> list[Shortfall]:
    """Of all live jobs, or of these. One small statement where nobody has a budget."""
    tenants = _budgeted(conn)
    if not tenants:
        return []
    query = select(Job.job_id, Job.tenant).where(Job.tenant.in_(tenants), job_is_live())
    query = query.where(~Job.cancel_requested)
    which: Iterable[ColumnElement[bool]] = (
        (true(),) if job_ids is None else (Job.job_id.in_(some) for some in in_parts(job_ids))
    )
    jobs = {row.job_id: row.tenant for one in which for row in conn.execute(query.where(one))}
    least = smallest(conn, list(jobs), Group.lease_owner.is_(None))
    of_tenants = accounts(conn, now, {jobs[job_id] for job_id in least})

    def of_job(job_id: str, to_come: int | None = None) -> Shortfall | None:
        account_of_job = of_tenants[jobs[job_id]]
        return budget_rules.shortfall(job_id, account_of_job, least[job_id], to_come)

    found = {job_id: short for job_id in sorted(least) if (short := of_job(job_id)) is not None}
    to_come = _smallest_to_come(conn, [one.job_id for one in found.values() if one.is_final])
    found |= {job_id: short for job_id in to_come if (short := of_job(job_id, to_come[job_id]))}
    return list(found.values())


def _smallest_to_come(conn: Connection, job_ids: Sequence[str]) -> dict[str, int]:
    """By job the smallest bound of a group that is to be verified yet; 1 while its input is read.
    (A reading that is paused waits for groups to end.)"""
    waits = Group.stage.in_([Stage.PROPOSE.value, Stage.VERIFY.value])
    is_read = or_(Job.ingest_done, Job.ingest_resumes_at.is_not(None))
    found: dict[str, int] = {}
    for some in in_parts(job_ids):
        query = (
            select(Job.job_id, case((is_read, func.min(bound())), else_=1).label("least"))
            .join(Group, Group.job_id == Job.job_id)
            .where(Job.job_id.in_(some), group_is_open(), waits)
            .group_by(Job.job_id, Job.ingest_done, Job.ingest_resumes_at)
        )
        found |= {row.job_id: int(row.least) for row in conn.execute(query)}
    return found


def waiting_for_budget(conn: Connection, now: Now, job_ids: Collection[str]) -> dict[str, str]:
    """Of these jobs, those with nothing to be done before a budget covers it: what each waits
    for, in words. A job that no budget will ever cover has to stop, and is not there."""
    short = {one.job_id: one.words for one in shortfalls(conn, now, job_ids) if not one.is_final}
    free = (Job.lease_until <= now) & (~job_is_due() | Job.ingest_resumes_at.is_not(None))
    other_work = exists().where(Group.job_id == Job.job_id, group_is_open(), ~_at_verify_and_free())
    idle = select(Job.job_id).where(free, ~other_work)
    return {
        job_id: short[job_id]
        for some in in_parts(short)
        for job_id in conn.scalars(idle.where(Job.job_id.in_(some)))
    }


def _at_verify_and_free() -> ColumnElement[bool]:
    return and_(Group.stage == Stage.VERIFY.value, Group.lease_owner.is_(None))


def is_held_back(short: Iterable[Shortfall]) -> ColumnElement[bool]:
    """Whether a group can be claimed by nobody now, as it is one of these jobs' at VERIFY."""
    job_ids = [one.job_id for one in short]
    if not job_ids:
        return false()
    return and_(_at_verify_and_free(), Group.job_id.in_(job_ids))


def exhausted(
    conn: Connection, now: Now, job_ids: Collection[str] | None = None
) -> list[tuple[str, str]]:
    """(job id, reason) of live jobs, or of these, that their tenants' budgets will never cover."""
    return [(one.job_id, one.reason) for one in shortfalls(conn, now, job_ids) if one.is_final]


def check_new(conn: Connection, now: Now, job: NewJob) -> None:
    """Raise `OverBudgetError` for a new job that its tenant's budgets cannot cover."""
    if not has_budget(conn, job.tenant):
        return
    of_tenant = account(conn, now, job.tenant)
    for reason in budget_rules.refusals(of_tenant, job.least):
        raise OverBudgetError(f"tenant {job.tenant} cannot submit this job: {reason}")


def check_retried(conn: Connection, now: Now, job_id: str, tenant: str) -> None:
    """Raise `OverBudgetError` where a job that was sent back to work would stop again at once.

    The caller holds the tenant's lock since before it sent the groups back.
    """
    if not has_budget(conn, tenant):
        return
    of_tenant = account(conn, now, tenant)
    raised = f"raise it with `specbatch tenants set {tenant}`, then retry the job"
    recorded_next = exists().where(
        Group.job_id == job_id, Group.stage == Stage.RECORD.value, Group.reserved_tokens > 0
    )
    has_results = bool(conn.scalar(select(recorded_next)))
    for budget in of_tenant.budgets:
        left = budget_rules.left_tokens(of_tenant, budget)
        if has_results and left is not None and left < 0:
            raise OverBudgetError(
                f"job {job_id} has results that wait to be recorded, and its tenant's budget of "
                f"{budget_rules.amounts(budget)} lacks {-left:,} tokens for them: {raised}"
            )
    least = _smallest_to_come(conn, [job_id]).get(job_id)
    lacking = least and budget_rules.shortfall(job_id, of_tenant, least)
    if lacking and lacking.is_final:
        raise OverBudgetError(f"job {job_id} would stop again: {lacking.reason}; {raised}")
