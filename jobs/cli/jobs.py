"""`specbatch jobs`: the newest jobs of the store."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer
from rich.table import Table

from specbatch.jobs.cli.connect import client, load_settings
from specbatch.jobs.cli.console import say, say_json, show_whole
from specbatch.jobs.cli.outcome import as_json
from specbatch.schemas.records import JobState


def jobs(
    state: Annotated[
        JobState | None, typer.Option(help="only jobs in this state", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(help="how many at most", min=1)] = 50,
    json: Annotated[bool, typer.Option("--json", help="one JSON array on one line")] = False,
) -> None:
    """List jobs, newest first."""
    with client(load_settings()) as c:
        found = [(job, c.progress(job.job_id)) for job in c.jobs(limit, state)]
    if json:
        say_json([as_json(job, progress) for job, progress in found])
        return
    if not found:
        say("no jobs")
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("job", "name", "state", "rows", "failed", "tokens", "created"):
        table.add_column(heading, no_wrap=True)
    for job, progress in found:
        created = datetime.fromtimestamp(job.created_at).strftime("%m-%d %H:%M")
        rows = f"{progress.rows_done:,}/{progress.rows_total:,}"
        counts = [f"{progress.rows_failed:,}", f"{progress.completion_tokens:,}"]
        table.add_row(job.job_id, job.name, str(job.state), rows, *counts, created)
    show_whole(table)
