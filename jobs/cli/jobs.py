"""`specbatch jobs`: the newest jobs of the store."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

import typer
from rich.table import Table

from specbatch.jobs.cli.connect import client
from specbatch.jobs.cli.console import say, say_json, show_whole
from specbatch.jobs.cli.options import MOST_SHOWN
from specbatch.jobs.cli.outcome import as_json
from specbatch.jobs.cli.stores import found_settings
from specbatch.pipeline.observe.terminal.progress import (
    INTERRUPTED,
    interrupted_line,
    resume_command,
)
from specbatch.pipeline.runtime.client import Client
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.records import JobRow, JobState

MOST_RUNNING = 100_000  # looked at for interrupted ones


class ShownState(StrEnum):
    """A state as the list shows it."""

    QUEUED = "queued"
    RUNNING = "running"
    INTERRUPTED = INTERRUPTED
    DONE = "done"
    PARTIAL = "partial"
    FAILED = "failed"
    CANCELLED = "cancelled"


def jobs(
    state: Annotated[
        ShownState | None, typer.Option(help="only jobs in this state", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(help="most jobs shown", min=1, max=MOST_SHOWN)] = 50,
    json: Annotated[bool, typer.Option("--json", help="one JSON array on one line")] = False,
) -> None:
    """List jobs, newest first."""
    settings = found_settings(always_say=True)
    with client(settings) as c:
        rows, stopped = _listed(c, state, limit, settings.lease_sec)
        found = [(job, c.progress(job.job_id)) for job in rows]
    if json:
        say_json([_as_json(job, progress, job.job_id in stopped) for job, progress in found])
        return
    if not found:
        say("no jobs")
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("job", "name", "state", "rows", "failed", "tokens", "created"):
        table.add_column(heading, no_wrap=True)
    for job, progress in found:
        created = datetime.fromtimestamp(job.created_at).strftime("%m-%d %H:%M")
        prompts = f"{progress.rows_done:,}/{progress.rows_total:,}"
        counts = [f"{progress.rows_failed:,}", f"{progress.completion_tokens:,}"]
        word = INTERRUPTED if job.job_id in stopped else str(job.state)
        table.add_row(job.job_id, job.name, word, prompts, *counts, created)
    show_whole(table)
    for job_id in stopped:
        say(interrupted_line(job_id))


def _listed(
    c: Client, state: ShownState | None, limit: int, lease_sec: float
) -> tuple[list[JobRow], list[str]]:
    """The jobs in a state, newest first, and the ids of those that are interrupted."""
    if state not in (ShownState.INTERRUPTED, ShownState.RUNNING):
        rows = c.jobs(limit, None if state is None else JobState(state))
        return rows, c.interrupted(rows, lease_sec)
    rows = c.jobs(MOST_RUNNING, JobState.RUNNING)
    stopped = c.interrupted(rows, lease_sec)
    wants_stopped = state is ShownState.INTERRUPTED
    rows = [row for row in rows if (row.job_id in stopped) is wants_stopped][:limit]
    return rows, [row.job_id for row in rows] if wants_stopped else []


def _as_json(job: JobRow, progress: JobProgress, interrupted: bool) -> dict[str, object]:
    resume = resume_command(job.job_id) if interrupted else None
    return as_json(job, progress, interrupted) | {"interrupted": interrupted, "resume": resume}
