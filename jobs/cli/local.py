"""`submit-job --local` and `retry --local`: a job done in this process, as a command shows it."""

from __future__ import annotations

import typer

from specbatch.jobs.cli.connect import client
from specbatch.jobs.cli.console import (
    INTERRUPTED,
    MAYBE_SUBMITTED,
    err,
    if_interrupted,
    remark,
    stored,
)
from specbatch.jobs.cli.outcome import finish, known_by_key
from specbatch.jobs.running.here import Watcher, check_place, run_job
from specbatch.pipeline.observe.terminal.progress import progress_view
from specbatch.schemas.errors import JobInterrupted
from specbatch.schemas.records import JobRow
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec


def submit_here(
    settings: Settings, spec: JobSpec, key: str | None, timeout_sec: float | None, json: bool
) -> None:
    """Check everything, do the job here, print how it ended."""
    from specbatch.jobs.cli.checks import check_job

    with client(settings) as c:
        check_place(settings, spec)
        check_job(settings, spec, key, c.is_keys_job)
        with if_interrupted(MAYBE_SUBMITTED):
            job, created = c.submit(spec, key)
        with if_interrupted(stored(job.job_id)):
            if not created:
                then = "nothing is done again" if job.state.is_final else "it resumes here"
                remark(known_by_key(job, then, local=True))
            again = "run the same command again" if key else None
            run_here(settings, spec, job, timeout_sec, again)
            finish(c, job.job_id, json)


def run_here(
    settings: Settings,
    spec: JobSpec,
    job: JobRow,
    timeout_sec: float | None = None,
    how_to_go_on: str | None = None,
) -> None:
    """Work until the job ends, with its progress on stderr. Ctrl-C stops cleanly.

    Raises what `run_job` raises.
    """
    watcher = Watcher(lambda: progress_view(err, spec.sampling.n, spec.sampling.max_tokens), remark)
    try:
        run_job(settings, spec, job, watcher, timeout_sec, how_to_go_on)
    except JobInterrupted as stopped:
        remark(str(stopped))
        raise typer.Exit(INTERRUPTED) from None
