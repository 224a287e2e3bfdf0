"""What stops a job early: a cancel request, its deadline, its budget, its tenant's budget."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from sqlalchemy import Connection, bindparam, case, func, or_, select, update

from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.sql import budgets, jobs
from specbatch.pipeline.ledger.sql.transactions import Now
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.records import JobState, Lease
from specbatch.schemas.tables import Group, Job, job_is_live


def cancelled(conn: Connection, now: Now, job_ids: Collection[str]) -> tuple[set[str], bool]:
    """(jobs with the cancel flag, whether another job may be over a limit)."""
    is_limited = or_(Job.deadline_at <= now, Job.budget_usd.is_not(None))
    rows = conn.execute(
        select(Job.job_id, Job.cancel_requested)
        .where(Job.job_id.in_(job_ids))
        .where(or_(Job.cancel_requested, is_limited))
    ).all()
    asked = {row.job_id for row in rows if row.cancel_requested}
    return asked, len(rows) > len(asked)


def note_in_flight(conn: Connection, _now: Now, spent_usd: Mapping[Lease, float]) -> None:
    """Note the cost so far of leased groups. Lost leases are skipped."""
    values = [
        {
            "at_job": lease.job_id,
            "at_index": lease.group_index,
            "at_generation": lease.token,
            "at_owner": lease.owner,
            "usd": usd,
        }
        for lease, usd in spent_usd.items()
        if lease.group_index is not None
    ]
    if values:
        held = (
            Group.job_id == bindparam("at_job"),
            Group.group_index == bindparam("at_index"),
            Group.generation == bindparam("at_generation"),
            Group.lease_owner == bindparam("at_owner"),  # none, once the group has ended
        )
        table = Group.__table__
        conn.execute(update(table).where(*held).values(in_flight_usd=bindparam("usd")), values)  # type: ignore[arg-type]  # a mapped class's table is a Table


def over_limits(
    conn: Connection, now: Now, job_ids: Iterable[str] | None = None
) -> list[tuple[str, str]]:
    """(job id, reason) of live jobs whose deadline has passed or whose budget is spent.

    The budget pays for attempts that were kept and for those in flight so far.
    """
    held = case((Group.lease_until > now, Group.in_flight_usd), else_=0.0)
    spent = (
        select(func.coalesce(func.sum(Group.device_usd + held), 0.0))
        .where(Group.job_id == Job.job_id)
        .correlate(Job)
        .scalar_subquery()
    )
    query = select(
        Job.job_id,
        Job.deadline_at,
        Job.budget_usd,
        (Job.deadline_at <= now).label("is_late"),
        case((Job.budget_usd.is_not(None), spent), else_=0.0).label("spent"),
    ).where(
        job_is_live(),
        ~Job.cancel_requested,
        or_(Job.deadline_at <= now, Job.budget_usd.is_not(None)),
    )
    if job_ids is not None:
        query = query.where(Job.job_id.in_(list(job_ids)))
    found = []
    for row in conn.execute(query.order_by(Job.job_id)):
        late, spent_usd = bool(row.is_late), float(row.spent)
        reason = rules.reason_to_stop(late, row.deadline_at, spent_usd, row.budget_usd)
        if reason is not None:
            found.append((row.job_id, reason))
    return found


def stop(conn: Connection, now: Now, job_id: str) -> bool:
    """Stop a job if it is over a limit; whether it is to stop.

    Looked at here once more, under the locks of those who raise limits: the job was found in
    another transaction, and a budget may have been raised since.
    """
    tenant = conn.scalar(select(Job.tenant).where(Job.job_id == job_id))
    if tenant is None:
        return False
    budgets.lock(conn, tenant)
    job = jobs.lock(conn, job_id)
    if JobState(job.state).is_final or job.cancel_requested:
        return bool(job.cancel_requested)
    found = over_limits(conn, now, [job_id]) or budgets.exhausted(conn, now, [job_id])
    for _, reason in found:
        jobs.request_cancel(conn, now, job_id, reason, EntryKind.STOPPED)
    return bool(found)
