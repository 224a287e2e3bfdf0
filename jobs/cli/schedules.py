"""`specbatch schedules`: what the schedule files say, and the results of their runs."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import complain, out, say, say_json
from specbatch.jobs.cli.options import SchedulesFolder
from specbatch.jobs.schedules.definition import load_folder
from specbatch.jobs.schedules.listing import Standing, local_words, standing
from specbatch.pipeline.bootstrap import make_store

WRONG_FILE = 2  # exit codes
LOST = 3


def schedules(
    folder: SchedulesFolder = None,
    check: Annotated[
        bool, typer.Option("--check", help="only check the files, without the store")
    ] = False,
    missed: Annotated[
        bool,
        typer.Option(
            "--missed", help="only those with times that were missed, failed or are overdue"
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="one JSON array on one line")] = False,
) -> None:
    """List schedules: when each is due next, and the result of its last run.

    Exit codes: 0 all well, 2 a file is wrong, 3 with --missed: there are some.
    """
    settings = load_settings()
    found, problems = load_folder(folder or Path(settings.schedules_dir))
    for problem in problems:
        complain(problem)
    if check:
        say(f"{len(found)} of {len(found) + len(problems)} schedule files are right")
        raise typer.Exit(WRONG_FILE if problems else 0)
    with closing(make_store(settings)) as store:
        standings = [standing(schedule, store, time.time()) for schedule in found]
    if missed:
        standings = [one for one in standings if not one.is_well]
    if json:
        say_json([one.as_json() for one in standings])
    elif standings:
        out.print(_table(standings))
    else:
        say("no schedule missed a time" if missed else "no schedules")
    if problems:
        raise typer.Exit(WRONG_FILE)
    if missed and standings:
        raise typer.Exit(LOST)


def _table(standings: list[Standing]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("schedule", "cron", "next", "last", "state"):
        table.add_column(heading, overflow="fold")
    for one in standings:
        times, last = one.schedule.times, one.last
        table.add_row(
            one.schedule.name,
            one.schedule.fields.cron,
            "-" if one.next_at is None else local_words(times.local(one.next_at)),
            "-" if last is None else local_words(times.local(last.logical_at)),
            one.words,
        )
    return table
