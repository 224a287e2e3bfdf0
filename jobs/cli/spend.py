"""`specbatch spend`: what devices cost this month, and what they will have cost at its end."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict
from typing import Annotated

import typer

from specbatch.jobs.cli.console import say, say_json
from specbatch.jobs.cli.stores import found_settings
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.operations.spending import sentence, spend_of, usd

OVER = 3  # exit code


def spend(
    limit: Annotated[
        float | None,
        typer.Option("--limit", min=0, help="dollars a month may cost", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON object on one line")] = False,
) -> None:
    """Show what devices cost this month and will have cost at its end; exit with 3 above a limit.

    Leased time counts, idle or not, by the sessions of workers. The rest of the month is expected
    to cost as much a day as the last four weeks did.
    """
    with closing(make_store(found_settings())) as store:
        found = spend_of(store, time.time(), limit)
    if json:
        say_json({**asdict(found), "over": found.is_over})
    else:
        say(sentence(found))
        if found.usual_usd_per_day is not None:
            say(f"a day costs {usd(found.usual_usd_per_day)}, as in the last four weeks")
    if found.is_over:
        raise typer.Exit(OVER)
