"""`specbatch cost`: where the time and the money went."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import say, say_json, show_whole
from specbatch.jobs.cli.cost_tables import (
    balance_table,
    figures,
    line_json,
    lines_table,
    sheet_json,
)
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.policy.costs.balance import Amount, Sheet, leased, sessions_sheet
from specbatch.pipeline.policy.costs.job_costs import By, JobCost, line_of, lines_by
from specbatch.schemas.records import JobRow

MOST_JOBS = 1_000_000


def cost(
    job: Annotated[
        str | None,
        typer.Argument(help="id of a job, or its first characters; without one, all that was paid"),
    ] = None,
    by: Annotated[
        By | None,
        typer.Option(help="lines by tenant, job, proposer, tag of the rows, or day of submission"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON object on one line")] = False,
) -> None:
    """Show where seconds and dollars went, what tokens and documents cost, and what was saved."""
    store = make_store(load_settings())
    try:
        costs = [cost_of(store, store.get_job(job))] if job else all_costs(store)
        sheet = sum((cost.sheet for cost in costs), Sheet())
        paid = sheet.total
        if job is None:
            sessions = store.sessions()
            sheet, paid = sheet + sessions_sheet(sessions), leased(sessions)
    finally:
        store.close()
    if json:
        say_json(_as_json(job, costs, by, sheet, paid))
        return
    if not paid.ticks and not costs:
        say("nothing was paid for yet")
        return
    show_whole(balance_table(sheet, paid, "what the job had" if job else "what was leased"))
    for line in figures(line_of(costs)):
        say(line)
    if by is not None:
        show_whole(lines_table(by, lines_by(by, costs)))


def cost_of(store: Store, job: JobRow) -> JobCost:
    """A job with its time."""
    return JobCost(job, store.job_times(job.job_id), store.row_times(job.job_id))


def all_costs(store: Store) -> list[JobCost]:
    return [cost_of(store, job) for job in store.list_jobs(MOST_JOBS)]


def _as_json(
    job: str | None, costs: list[JobCost], by: By | None, sheet: Sheet, paid: Amount
) -> dict[str, Any]:
    told: dict[str, Any] = {"job": costs[0].job.job_id if job else None}
    told |= sheet_json(sheet, paid) | {"figures": line_json(line_of(costs))}
    if by is not None:
        told |= {"by": by.value, "lines": [line_json(line) for line in lines_by(by, costs)]}
    return told
