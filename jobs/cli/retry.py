"""`specbatch retry JOB`: what failed or was cancelled is done again, and nothing else."""

from __future__ import annotations

from typing import Annotated

import typer

from specbatch.jobs.cli import options as o
from specbatch.jobs.cli.connect import client, load_settings
from specbatch.jobs.cli.console import remark, say
from specbatch.schemas.spec import spec_of


def retry(
    job: o.JobId,
    local: Annotated[
        bool, typer.Option("--local", help="work in this process until the job ends")
    ] = False,
    quarantined: Annotated[
        bool,
        typer.Option("--quarantined", help="only rows that failed by themselves, by all attempts"),
    ] = False,
    timeout: o.Timeout = None,
    json: o.Json = False,
) -> None:
    """Send a job's failed and cancelled groups, or only its quarantined rows, back to work.

    With --local, go on with it here.
    """
    settings = load_settings()
    with client(settings) as c:
        row = c.job(job)
        going_on = local and not row.state.is_final
        count = 0 if going_on else c.retry(row.job_id, quarantined)
        if not going_on:
            found = (
                f"{count} unit{'s' if count != 1 else ''} back to work"
                if count
                else "nothing to retry"
            )
            (remark if local else say)(f"job {row.job_id}: {found}")
        if not local:
            return
        from specbatch.jobs.cli.local import run_here
        from specbatch.jobs.cli.outcome import finish

        row = c.job(row.job_id)
        if not row.state.is_final:
            run_here(settings, spec_of(row), row, timeout)
        finish(c, row.job_id, json)
