"""`specbatch cancel JOB`: what is finished is kept, the rest is left to be done."""

from __future__ import annotations

import getpass

from specbatch.jobs.cli.connect import client, load_settings
from specbatch.jobs.cli.console import say
from specbatch.jobs.cli.options import JobId


def cancel(job: JobId) -> None:
    """Ask a job to stop: finished rows are kept, the others left beside the output as a job."""
    with client(load_settings()) as c:
        before = c.job(job)
        row = c.cancel(before.job_id, f"cancelled by {_who()}")
    if before.state.is_final:
        say(f"job {row.job_id} is {row.state} already; nothing to cancel")
    else:
        say(f"job {row.job_id} will be cancelled; finished rows are kept and published")


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return "a user without a name"
