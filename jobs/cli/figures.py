"""`specbatch figures`: what the last weeks gave and cost, for those who pay."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.table import Table

from specbatch.jobs.cli.console import say, say_json, show_whole
from specbatch.jobs.cli.cost import MOST_JOBS, cost_of, saved_line, signed_usd
from specbatch.jobs.cli.stores import found_settings
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.operations.spending import sentence, spend_of
from specbatch.pipeline.policy.costs.job_costs import JobCost, Line, line_of
from specbatch.schemas.days import DAY_SEC
from specbatch.schemas.job_progress import JobProgress

MOST_DAYS = 36_500  # a calendar ends somewhere
_WEEK_SEC = 7 * DAY_SEC


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the jobs that were submitted in a span."""

    begin: str  # a day in UTC
    line: Line
    proposed: int
    accepted: int

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.proposed if self.proposed else None

    def as_json(self) -> dict[str, Any]:
        saved = self.line.saved
        return {
            "from": self.begin,
            "jobs": self.line.jobs,
            "tokens": self.line.completion_tokens,
            "usd": self.line.cost.usd,
            "usd_per_1k_tokens": self.line.usd_per_1k_tokens,
            "acceptance": self.acceptance,
            "saved_usd": None if saved is None else saved.usd,
        }


def figures(
    days: Annotated[int, typer.Option("--days", min=1, max=MOST_DAYS, help="back from now")] = 30,
    json: Annotated[bool, typer.Option("--json", help="one JSON object on one line")] = False,
) -> None:
    """Show acceptance, tokens, cost per 1,000, savings and the month's forecast, week by week.

    A job counts in the week in which it was submitted. Weeks are counted back from now.
    """
    now = time.time()
    with closing(make_store(found_settings())) as store:
        weeks, whole = _figures(store, now, days)
        spend = spend_of(store, now)
    if json:
        of_month = asdict(spend)
        found = [one.as_json() for one in weeks]
        say_json({"days": days, "weeks": found, "whole": whole.as_json(), "month": of_month})
        return
    if whole.line.jobs:
        show_whole(_table(weeks, whole))
        say(saved_line(whole.line.saved, whole.line.drafted))
    else:
        say(f"no job was submitted in the last {days:,} days")
    say(sentence(spend))


def _figures(store: Store, now: float, days: int) -> tuple[list[Figures], Figures]:
    """By week, the oldest first, and of all of them."""
    begin = now - days * DAY_SEC
    jobs = [job for job in store.list_jobs(MOST_JOBS) if job.created_at >= begin]
    known = [(cost_of(store, job), store.progress(job.job_id)) for job in jobs]
    weeks = []
    for n in reversed(range(math.ceil(days / 7))):
        first = now - (n + 1) * _WEEK_SEC
        end = first + _WEEK_SEC if n else math.inf  # one may have been submitted just now
        of = [one for one in known if first <= one[0].job.created_at < end]
        weeks.append(_of(max(first, begin), of))
    return weeks, _of(begin, known)


def _of(begin: float, known: Sequence[tuple[JobCost, JobProgress]]) -> Figures:
    day = datetime.fromtimestamp(begin, UTC).date().isoformat()
    proposed = sum(progress.proposed for _, progress in known)
    accepted = sum(progress.accepted for _, progress in known)
    return Figures(day, line_of(cost for cost, _ in known), proposed, accepted)


def _table(weeks: Sequence[Figures], whole: Figures) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("from (UTC)")
    for heading in ("jobs", "tokens", "dollars", "per 1k", "accepted", "saved"):
        table.add_column(heading, justify="right")
    for name, one in [*((week.begin, week) for week in weeks), ("all", whole)]:
        line, saved = one.line, one.line.saved
        per_1k = line.usd_per_1k_tokens
        table.add_row(
            *(name, f"{line.jobs:,}", f"{line.completion_tokens:,}", f"{line.cost.usd:,.6f}"),
            "-" if per_1k is None else f"{per_1k:.6f}",
            "-" if one.acceptance is None else f"{one.acceptance:.1%}",
            "-" if saved is None else signed_usd(saved.usd),
        )
    return table
