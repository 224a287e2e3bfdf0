"""`specbatch acceptance NAME`: how often drafts were right, night by night, beside a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from specbatch.jobs.cli.console import say, say_json, show_whole
from specbatch.jobs.cli.stores import found_settings
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.ledger.contract import MOST_JOBS, Store
from specbatch.pipeline.observe.units import date_of
from specbatch.pipeline.policy.slow_fall import THRESHOLD, SlowFall, by_series, slow_fall
from specbatch.schemas.errors import UsageError
from specbatch.schemas.fingerprint import shown
from specbatch.schemas.records import NO_TAG
from specbatch.schemas.speculation import AcceptanceDay

_MOST_NAMED = 10


def acceptance(
    name: Annotated[str, typer.Argument(help="the name of jobs, as `specbatch jobs` lists it")],
    tenant: Annotated[str, typer.Option("--tenant", help="whose jobs")] = "default",
    nights: Annotated[int, typer.Option("--nights", min=1, help="how many, the newest ones")] = 14,
    accept: Annotated[
        bool,
        typer.Option("--accept", help="make what today's and later nights have the baseline"),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="one JSON object on one line")] = False,
) -> None:
    """Show how many drafts a job's nights accepted, by proposer and tag, and what falls slowly."""
    with closing(make_store(found_settings())) as store:
        accepted = store.supersede_acceptance(tenant, name) if accept else 0
        found = store.acceptance_days(tenant, name)
        if not found:
            raise UsageError(_unknown(store, tenant, name))
    told = [
        # A worse model is a fall, too, so the test is of all of them together.
        (_newest(found, key, days[-nights:][0].day), slow_fall(days))
        for key, days in by_series(found).items()
    ]
    if json:
        series = [_as_json(days, fall) for days, fall in told]
        say_json({"name": name, "series": series, "accepted": accepted})
        return
    show_whole(_table(told))
    for days, fall in told:
        say(_sentence(days, fall))
    if accept:
        say(f"{accepted:,} earlier figures are no baseline any more; they stay in the table")


def _unknown(store: Store, tenant: str, name: str) -> str:
    jobs = store.list_jobs(MOST_JOBS)
    names = sorted({job.name for job in jobs if job.tenant == tenant and job.name})
    known = ", ".join(names[:_MOST_NAMED]) or "none"
    return (
        f"nothing was drafted for jobs named {name!r} of tenant {tenant!r}; "
        f"names of its jobs: {known}{', …' if len(names) > _MOST_NAMED else ''}"
    )


def _newest(
    found: Sequence[AcceptanceDay], key: tuple[str, str | None], first_day: int
) -> list[AcceptanceDay]:
    """The days of a proposer and tag, model by model."""
    mine = [one for one in found if (one.proposer, one.tag) == key and one.day >= first_day]
    return sorted(mine, key=lambda one: (one.day, one.fingerprint))


def _table(told: list[tuple[list[AcceptanceDay], SlowFall | None]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("proposer", "tag", "day (UTC)"):
        table.add_column(heading)
    for heading in ("tested", "accepted", "baseline", "of it"):
        table.add_column(heading, justify="right")
    for days, fall in told:
        for one in days:
            rate = one.agreed / one.tested
            figures = (
                ("-", "-")
                if fall is None
                else (f"{fall.reference:.1%}", f"{rate / fall.reference:.0%}")
            )
            table.add_row(
                *(_who(one), one.tag or NO_TAG, date_of(one.day)),
                *(f"{one.tested:,.0f}", f"{rate:.1%}", *figures),
            )
    return table


def _sentence(days: Sequence[AcceptanceDay], fall: SlowFall | None) -> str:
    newest = days[-1]
    models = len({one.fingerprint for one in days})
    who = _who(newest) if models == 1 else f"{newest.proposer}, {models} models together"
    of = f"{who}, {newest.tag or NO_TAG}"
    if fall is None:
        return (
            f"{of}: no baseline yet: it takes ten nights of 200 tokens in three weeks, then three"
        )
    nights = f"the nights from {date_of(fall.first_day)} to {date_of(fall.last_day)}"
    word = "falls slowly" if fall.falls else "no slow fall"
    score = f"score {fall.score:.1f}, a fall from {THRESHOLD:g} on"
    return f"{of}: {word} ({score}); the baseline is {nights}"


def _who(day: AcceptanceDay) -> str:
    return f"{day.proposer} {shown(day.fingerprint)}".rstrip()


def _as_json(days: list[AcceptanceDay], fall: SlowFall | None) -> dict[str, Any]:
    return {
        "proposer": days[-1].proposer,
        "fingerprint": days[-1].fingerprint,
        "tag": days[-1].tag,
        "nights": [
            {
                "day": date_of(one.day),
                "fingerprint": one.fingerprint,
                "tested": one.tested,
                "acceptance": one.agreed / one.tested,
                "superseded": one.superseded,
            }
            for one in days
        ],
        "baseline": None
        if fall is None
        else {
            **asdict(fall),
            "first_day": date_of(fall.first_day),
            "last_day": date_of(fall.last_day),
            "falls": fall.falls,
        },
    }
