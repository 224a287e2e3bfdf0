"""A job for workers elsewhere: check what can be checked here, submit, perhaps follow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from specbatch.jobs.cli.connect import check_broker, client
from specbatch.jobs.cli.console import (
    INTERRUPTED,
    MAYBE_SUBMITTED,
    err,
    if_interrupted,
    remark,
    say,
    say_json,
    stored,
)
from specbatch.jobs.cli.outcome import as_json, finish, known_by_key
from specbatch.pipeline.observe.terminal.progress import progress_view
from specbatch.pipeline.runtime.client import Client
from specbatch.schemas.errors import StoreError, WaitTimeoutError
from specbatch.schemas.patience import NoAnswerError, end_within
from specbatch.schemas.records import JobRow
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec
from specbatch.schemas.timekeeping import LEASES_OF_SILENCE

if TYPE_CHECKING:
    from specbatch.jobs.running.here import Show

POLL_SEC = 0.5
POLLS_PER_WORKER_CHECK = 10


def submit_there(
    settings: Settings,
    spec: JobSpec,
    key: str | None,
    wait: bool,
    timeout_sec: float | None,
    json: bool,
) -> None:
    """Store the job and enqueue it; with `wait`, follow it to its end."""
    begun = time.monotonic()
    check_broker(settings)
    with client(settings) as c:
        with if_interrupted(MAYBE_SUBMITTED):
            job, created = c.submit(spec, key)
        with if_interrupted(stored(job.job_id)):
            known = known_by_key(job, "nothing is submitted twice")
            remark(f"job {job.job_id} submitted" if created else known)
            with gives_up(job, timeout_sec):
                said = tell_waiting(settings, c, job)
            if wait:
                left = timeout_sec and max(0.0, timeout_sec - (time.monotonic() - begun))
                follow(settings, c, job, spec, left, said)
                finish(c, job.job_id, json)
            if json:
                say_json(as_json(job, c.progress(job.job_id)))
            else:
                say(job.job_id)


@contextmanager
def gives_up(job: JobRow, timeout_sec: float | None) -> Iterator[None]:
    """A store that does not answer before the timeout ends the waiting, not the job."""
    try:
        yield
    except StoreError as error:
        if timeout_sec is None or not isinstance(error.__cause__, NoAnswerError):
            raise
        raise WaitTimeoutError(
            f"job {job.job_id} has not ended, it keeps running: {error}"
        ) from error


def tell_waiting(
    settings: Settings, c: Client, job: JobRow, before: str | None = None
) -> str | None:
    """Say what the job lacks, unless that was said `before`; what it lacks."""
    waits = c.waits_for(job.job_id, LEASES_OF_SILENCE * settings.lease_sec)
    if waits is not None and waits != before:
        remark(f"job {job.job_id} {waits}")
    return waits


def watch(
    settings: Settings,
    c: Client,
    job: JobRow,
    show: Show,
    timeout_sec: float | None,
    said: str | None = None,
) -> None:
    """Call `show` with the job's progress until it ends, and say what it lacks.

    Raises `WaitTimeoutError`; the job then keeps running.
    """
    for poll, progress in enumerate(c.follow(job.job_id, POLL_SEC, timeout_sec), 1):
        show(progress, None)
        if poll % POLLS_PER_WORKER_CHECK == 0:
            said = tell_waiting(settings, c, job, said)


def follow(
    settings: Settings,
    c: Client,
    job: JobRow,
    spec: JobSpec,
    timeout_sec: float | None,
    said: str | None = None,
) -> None:
    """Show progress until the job ends, and what it lacks. Ctrl-C ends the waiting, not the job.

    `said`: what of that was said before.
    """
    sampling = spec.sampling
    try:
        with (
            gives_up(job, timeout_sec),
            progress_view(err, sampling.n, sampling.max_tokens) as show,
        ):
            watch(settings, c, job, show, timeout_sec, said)
        end_within(None)  # the job has ended: what is left is to say how
    except KeyboardInterrupt:
        remark(
            f"stopped waiting; job {job.job_id} continues: `specbatch show {job.job_id}` says how "
            f"far it is, `specbatch cancel {job.job_id}` ends it"
        )
        raise typer.Exit(INTERRUPTED) from None
