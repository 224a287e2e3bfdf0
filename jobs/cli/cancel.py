"""`specbatch cancel JOB`: what is finished is kept, the rest is dropped."""

from __future__ import annotations

from specbatch.jobs.cli.connect import client, load_settings
from specbatch.jobs.cli.console import say
from specbatch.jobs.cli.options import JobId


def cancel(job: JobId) -> None:
    """Ask a job to stop; workers drop it within a third of a lease."""
    with client(load_settings()) as c:
        before = c.job(job)
        row = c.cancel(job)
    if before.state.is_final:
        say(f"job {row.job_id} is {row.state} already; nothing to cancel")
    else:
        say(f"job {row.job_id} will be cancelled; finished groups are kept and published")
