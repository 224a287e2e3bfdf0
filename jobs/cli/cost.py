"""`specbatch cost`: where the time and the money went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from specbatch.jobs.cli.completing import jobs_beginning
from specbatch.jobs.cli.console import say, say_json, show_whole
from specbatch.jobs.cli.stores import found_settings
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.operations.report import MEANING
from specbatch.pipeline.policy.costs.balance import Amount, Sheet, leased, sessions_sheet
from specbatch.pipeline.policy.costs.job_costs import By, JobCost, Line, line_of, lines_by
from specbatch.pipeline.policy.costs.savings import NOT_MEASURED, NOTHING_DRAFTED
from specbatch.pipeline.policy.costs.stage_costs import DEVICE, StageCost, added, total_usd
from specbatch.schemas.job_figures import Savings
from specbatch.schemas.provenance import TimeKind
from specbatch.schemas.records import JobRow, Stage
from specbatch.schemas.timekeeping import usd_of
from specbatch.schemas.usage import PARTS

MOST_JOBS = 1_000_000
WORKING = "what was leased; workers continued while it was read"


def cost(
    job: Annotated[
        str | None,
        typer.Argument(
            help="a job, as `show` takes it; without one, all that was paid",
            autocompletion=jobs_beginning,
        ),
    ] = None,
    by: Annotated[
        By | None,
        typer.Option(help="lines by tenant, job, proposer, tag of the rows, or day of submission"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON object on one line")] = False,
) -> None:
    """Show where seconds and dollars went, what tokens and documents cost, and what was saved."""
    total = "total of the job" if job else "what was leased"
    with closing(make_store(found_settings())) as store:
        # Before the jobs: what ended sessions gave them does not change any more.
        sessions = [] if job else store.sessions()
        jobs = [store.get_job(job)] if job else store.list_jobs(MOST_JOBS)
        costs = [cost_of(store, one) for one in jobs]
        sheet = sum((cost.sheet for cost in costs), Sheet())
        paid = sheet.total
        if job is None:
            sheet, paid = sheet + sessions_sheet(sessions), leased(sessions)
            if sheet.total != paid:
                is_live = any(one.leased is None for one in sessions)
                total = WORKING if is_live else "the parts above do not add up to this"
    if json:
        say_json(_as_json(job, costs, by, sheet, paid))
        return
    if not paid.ticks and not costs:
        say("no costs yet")
        return
    show_whole(balance_table(sheet, paid, total))
    show_whole(stages_table(added(cost.by_stage for cost in costs)))
    for line in figures(line_of(costs)):
        say(line)
    if by is not None:
        show_whole(lines_table(by, lines_by(by, costs)))


def cost_of(store: Store, job: JobRow) -> JobCost:
    """A job with its time."""
    return JobCost(
        job,
        store.job_times(job.job_id),
        store.row_times(job.job_id),
        store.stage_usage(job.job_id),
    )


def _as_json(
    job: str | None, costs: list[JobCost], by: By | None, sheet: Sheet, paid: Amount
) -> dict[str, Any]:
    payload: dict[str, Any] = {"job": costs[0].job.job_id if job else None}
    payload |= sheet_json(sheet, paid) | {"figures": line_json(line_of(costs))}
    payload["stages"] = stages_json(added(cost.by_stage for cost in costs))
    if by is not None:
        payload |= {"by": by.value, "lines": [line_json(line) for line in lines_by(by, costs)]}
    return payload


def balance_table(sheet: Sheet, paid: Amount, total: str) -> Table:
    """Kinds of time with their share of the money, and their sum."""
    table = Table(title="balance", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("kind")
    for heading in ("seconds", "dollars", "share"):
        table.add_column(heading, justify="right")
    table.add_column("", style="dim")
    parts = [(kind.value, sheet.of(kind), MEANING[kind]) for kind in TimeKind]
    if sheet.pending.ticks:
        parts.append(("pending", sheet.pending, "in flight, or not recorded yet"))
    for name, amount, meaning in parts:
        share = amount.units / paid.units if paid.units else 0.0
        table.add_row(name, f"{amount.sec:,.3f}", f"{amount.usd:.6f}", f"{share:.1%}", meaning)
    table.add_row("sum", f"{paid.sec:,.3f}", f"{paid.usd:.6f}", "", total)
    return table


def stages_table(stages: Mapping[Stage, StageCost]) -> Table:
    """What stages cost in dollars, by part, and their sum."""
    title = "by stage, in dollars"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("stage")
    for heading in (DEVICE, *PARTS, "sum", "lost of it"):
        table.add_column(heading, justify="right")
    total = sum(stages.values(), StageCost())
    for name, cost in [*((stage.value, cost) for stage, cost in stages.items()), ("sum", total)]:
        parts = [cost.of(part) for part in (DEVICE, *PARTS)]
        table.add_row(name, *(f"{usd_of(n):.6f}" for n in (*parts, cost.total, cost.lost)))
    return table


def stages_line(stages: Mapping[Stage, StageCost]) -> str:
    """One sentence about what each stage cost."""
    parts = (f"{stage} ${usd_of(cost.total):.6f}" for stage, cost in stages.items() if cost.total)
    return f"price by stage: {', '.join(parts) or 'nothing yet'}; ${total_usd(stages):.6f} in all"


def stages_json(stages: Mapping[Stage, StageCost]) -> dict[str, Any]:
    """By stage: what was used, and units of money, which add up, as text."""
    return {
        stage.value: {
            "used": asdict(cost.used),
            "units": {part: str(cost.of(part)) for part in (DEVICE, *PARTS)},
            "sum": _money(cost.total),
            "lost": _money(cost.lost),
            "pending": _money(cost.pending),
        }
        for stage, cost in stages.items()
    }


def _money(units: int) -> dict[str, Any]:
    return {"units": str(units), "usd": usd_of(units)}


def figures(line: Line) -> list[str]:
    """What tokens and documents cost, and what was saved."""
    return [
        f"cost per 1k tokens: {_usd(line.usd_per_1k_tokens)}",
        f"cost per document: {_usd(line.usd_per_document)}",
        "cost per accepted draft token, refused ones included: "
        + _usd(line.usd_per_accepted_token, 9),
        saved_line(line.saved, line.drafted),
    ]


def saved_line(saved: Savings | None, is_drafted: bool) -> str:
    """One sentence about depth 0."""
    if not is_drafted:
        return f"saved against depth 0: {NOTHING_DRAFTED}"
    if saved is None:
        return f"saved against depth 0: {NOT_MEASURED}"
    text = f"saved against depth 0: {signed_usd(saved.usd)} ({saved.speedup:.2f}×)"
    if saved.low_usd is None or saved.high_usd is None:
        why = "there was only one control step"
        if saved.controls > 1:  # of several jobs together
            why = "one of the jobs had only one control step"
        return f"{text}, without an interval: {why}"
    return f"{text}, 95 % interval {signed_usd(saved.low_usd)} to {signed_usd(saved.high_usd)}"


def lines_table(by: By, lines: Sequence[Line]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(by.value, overflow="fold")
    for heading in ("jobs", "documents", "tokens", "dollars", "per 1k", "per document", "saved"):
        table.add_column(heading, justify="right")
    for line in lines:
        saved = line.saved
        table.add_row(
            line.name,
            f"{line.jobs:,}",
            f"{line.documents:,}",
            f"{line.completion_tokens:,}",
            f"{line.cost.usd:.6f}",
            _usd(line.usd_per_1k_tokens),
            _usd(line.usd_per_document),
            "-" if saved is None else signed_usd(saved.usd),  # `figures` says why
        )
    return table


def sheet_json(sheet: Sheet, paid: Amount) -> dict[str, Any]:
    """Times and costs are whole numbers that add up; costs as text, as JSON's are too small."""
    parts = {kind.value: _amount(sheet.of(kind)) for kind in TimeKind}
    return {"paid": _amount(paid), "parts": parts | {"pending": _amount(sheet.pending)}}


def line_json(line: Line) -> dict[str, Any]:
    return {
        "name": line.name,
        "jobs": line.jobs,
        "documents": line.documents,
        "tokens": line.completion_tokens,
        "accepted": line.accepted,
        "cost": _amount(line.cost),
        "usd_per_1k_tokens": line.usd_per_1k_tokens,
        "usd_per_document": line.usd_per_document,
        "usd_per_accepted_token": line.usd_per_accepted_token,
        **saved_json(line.saved, line.drafted),
    }


def saved_json(saved: Savings | None, is_drafted: bool) -> dict[str, float | bool | None]:
    names = ("saved_usd", "saved_low_usd", "saved_high_usd", "speedup")
    values: dict[str, float | bool | None] = dict.fromkeys(names)
    if saved is not None:
        found = (saved.usd, saved.low_usd, saved.high_usd, saved.speedup)
        values |= dict(zip(names, found, strict=True))
    return values | {"drafted": is_drafted}


def _amount(amount: Amount) -> dict[str, Any]:
    return {
        "ticks": amount.ticks,
        "units": str(amount.units),
        "sec": amount.sec,
        "usd": amount.usd,
    }


def _usd(value: float | None, digits: int = 6) -> str:
    return "-" if value is None else f"${value:.{digits}f}"


def signed_usd(value: float) -> str:
    return f"{'-' if value < 0 else ''}${abs(value):.6f}"
