"""`specbatch jobs`: the newest jobs of the store."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer
from rich.table import Table

from specbatch.jobs.cli.connect import client, load_settings
from specbatch.jobs.cli.console import say, say_json, show_whole
from specbatch.jobs.cli.outcome import as_json
from specbatch.pipeline.observe.terminal.progress import INTERRUPTED, interrupted_line
from specbatch.schemas.records import JobState


def jobs(
    state: Annotated[
        JobState | None, typer.Option(help="only jobs in this state", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(help="how many at most", min=1)] = 50,
    json: Annotated[bool, typer.Option("--json", help="one JSON array on one line")] = False,
) -> None:
    """List jobs, newest first."""
    settings = load_settings()
    with client(settings) as c:
        found = [(job, c.progress(job.job_id)) for job in c.jobs(limit, state)]
        stopped = c.interrupted([job for job, _ in found], settings.lease_sec)
    if json:
        say_json([as_json(j, p) | {"interrupted": j.job_id in stopped} for j, p in found])
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
        word = INTERRUPTED if job.job_id in stopped else str(job.state)
        table.add_row(job.job_id, job.name, word, rows, *counts, created)
    show_whole(table)
    for job_id in stopped:
        say(interrupted_line(job_id))
