"""A job for workers elsewhere: check what can be checked here, submit, perhaps follow."""

from __future__ import annotations

import typer

from specbatch.jobs.cli.connect import check_broker, client
from specbatch.jobs.cli.console import INTERRUPTED, err, remark, say, say_json
from specbatch.jobs.cli.outcome import as_json, finish
from specbatch.jobs.cli.reach import check_input_here
from specbatch.pipeline.client import Client
from specbatch.pipeline.observe.progress import progress_view
from specbatch.schemas.records import JobRow
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec


def submit_there(
    settings: Settings,
    spec: JobSpec,
    key: str | None,
    wait: bool,
    timeout_sec: float | None,
    json: bool,
) -> None:
    """Store the job and ring for it; with `wait`, follow it to its end."""
    check_broker(settings)
    check_input_here(spec.input)
    with client(settings) as c:
        job, created = c.submit(spec, key)
        known = f"is known by this key and {job.state}: nothing is submitted twice"
        remark(f"job {job.job_id} {'submitted' if created else known}")
        if wait:
            follow(c, job, spec, timeout_sec)
            finish(c, job.job_id, json)
        if json:
            say_json(as_json(job, c.progress(job.job_id)))
        else:
            say(job.job_id)


def follow(c: Client, job: JobRow, spec: JobSpec, timeout_sec: float | None) -> None:
    """Show progress until the job ends. Ctrl-C ends the waiting, not the job."""
    try:
        with progress_view(err, spec.sampling.n) as show:
            for progress in c.follow(job.job_id, 0.5, timeout_sec):
                show(progress, None)
    except KeyboardInterrupt:
        remark(
            f"stopped waiting; job {job.job_id} goes on: `specbatch show {job.job_id}` tells how "
            f"far it is, `specbatch cancel {job.job_id}` ends it"
        )
        raise typer.Exit(INTERRUPTED) from None
