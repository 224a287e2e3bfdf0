"""A tenant's jobs, and what it has had. No statement here finds another tenant's."""

from __future__ import annotations

from sqlalchemy import Connection, case, func, select

from specbatch.pipeline.ledger.sql.serving import paged
from specbatch.schemas import mapper
from specbatch.schemas.records import JobRow, JobState
from specbatch.schemas.serving import Page, TenantUse
from specbatch.schemas.tables import Group, Job


def job(conn: Connection, tenant: str, job_id: str) -> JobRow | None:
    query = select(*Job.__table__.c).where(Job.tenant == tenant, Job.job_id == job_id)
    row = conn.execute(query).first()
    return None if row is None else mapper.job_row(row)


def jobs(
    conn: Connection,
    tenant: str,
    page: Page,
    state: JobState | None = None,
    name: str | None = None,
) -> list[JobRow]:
    query = select(*Job.__table__.c).where(Job.tenant == tenant)
    if name is not None:
        query = query.where(Job.name == name)
    if state is not None:
        query = query.where(Job.state == state.value)
    return [mapper.job_row(row) for row in conn.execute(paged(query, Job.job_id, page))]


def states(conn: Connection, tenant: str) -> dict[JobState, int]:
    query = select(Job.state, func.count()).where(Job.tenant == tenant).group_by(Job.state)
    return {JobState(state): int(count) for state, count in conn.execute(query)}


def use(conn: Connection, tenant: str, since: float = 0.0) -> TenantUse:
    """Two statements. A group with completions was ready last when they were stored."""
    submitted = select(func.count()).where(Job.tenant == tenant, Job.created_at >= since)
    recorded = (Group.completions, Group.prompt_tokens, Group.completion_tokens, Group.cost_usd)
    had = (Group.completions > 0) & (Group.ready_at >= since)
    sums = (func.coalesce(func.sum(case((had, column), else_=0)), 0) for column in recorded)
    whole = select(*sums).join(Job, Job.job_id == Group.job_id).where(Job.tenant == tenant)
    completions, prompts, tokens, usd = conn.execute(whole).one()
    count = conn.execute(submitted).scalar_one()
    return TenantUse(int(count), int(completions), int(prompts), int(tokens), float(usd))
