"""`specbatch watch JOB`: one job, live, until it ends."""

from __future__ import annotations

from typing import Annotated

import typer

from specbatch.jobs.cli.connect import client
from specbatch.jobs.cli.console import INTERRUPTED, err, remark
from specbatch.jobs.cli.options import JobId, Json, Timeout
from specbatch.jobs.cli.outcome import finish
from specbatch.jobs.cli.remote import POLLS_PER_WORKER_CHECK, gives_up, tell_waiting
from specbatch.jobs.cli.stores import found_settings
from specbatch.pipeline.observe.terminal.progress import (
    interrupted_line,
    progress_view,
)
from specbatch.pipeline.runtime.client import Client
from specbatch.schemas.patience import end_within
from specbatch.schemas.records import JobRow
from specbatch.schemas.settings import Settings


def watch(
    job: JobId,
    interval: Annotated[
        float, typer.Option("--interval", help="seconds between two looks at the store", min=0.1)
    ] = 0.5,
    timeout: Timeout = None,
    json: Json = False,
) -> None:
    """Follow a job to its end; Ctrl-C stops watching, not the job.

    A live bar on a terminal, else a line for each change. The exit code is that of the job's
    outcome, as `submit-job --wait` has it.
    """
    settings = found_settings()
    end_within(timeout)
    with client(settings) as c:
        row = c.job(job)
        _follow(settings, c, row, interval, timeout)
        finish(c, row.job_id, json)


def _follow(
    settings: Settings, c: Client, job: JobRow, interval: float, timeout: float | None
) -> None:
    sampling = job.spec.get("sampling") or {}
    samples, most = int(sampling.get("n") or 1), sampling.get("max_tokens")
    said: str | None = None
    is_told = False
    try:
        with (
            gives_up(job, timeout),
            progress_view(err, samples, most, every_change=True) as show,
        ):
            for look, progress in enumerate(c.follow(job.job_id, interval, timeout)):
                show(progress, None)
                if progress.state.is_final or look % POLLS_PER_WORKER_CHECK:
                    continue
                said = tell_waiting(settings, c, job, said)
                stopped = bool(c.interrupted([c.job(job.job_id)], settings.lease_sec))
                if stopped and not is_told:
                    remark(interrupted_line(job.job_id))
                is_told = stopped
        end_within(None)  # the job has ended: what is left is to say how
    except KeyboardInterrupt:
        remark(
            f"stopped watching; job {job.job_id} is not stopped by this: `specbatch cancel "
            f"{job.job_id}` ends it, `specbatch watch {job.job_id}` watches it again"
        )
        raise typer.Exit(INTERRUPTED) from None
