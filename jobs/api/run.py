"""`specbatch.run`: a whole job in this process, from a frame or a path to a frame or a path."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Unpack, overload

from specbatch.jobs.api.frames import Frame, with_completions
from specbatch.jobs.api.options import Asked, Place, RunOptions, asked
from specbatch.jobs.api.orders import Order, Request
from specbatch.jobs.api.places import settings_of
from specbatch.jobs.api.progress import view_of
from specbatch.jobs.cli.checks import check_input_here, check_job, check_models_first
from specbatch.jobs.cli.connect import client
from specbatch.jobs.cli.console import quieten_libraries, remark
from specbatch.jobs.running.here import IN_MEMORY, Watcher, check_place, run_job
from specbatch.pipeline.runtime.client import Client
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.audit import data_uri
from specbatch.schemas.errors import (
    JobFailedError,
    JobInterrupted,
    ObjectError,
    RowsFailedWarning,
)
from specbatch.schemas.records import JobRow, JobState
from specbatch.schemas.settings import Settings

AGAIN = "make the same call again"


@overload
def run(
    data: Frame,
    *,
    model: Place | None = None,
    draft_model: Place | None = None,
    output: None = None,
    **options: Unpack[RunOptions],
) -> Frame: ...


@overload
def run(
    data: Frame,
    *,
    model: Place | None = None,
    draft_model: Place | None = None,
    output: Place,
    **options: Unpack[RunOptions],
) -> str: ...


@overload
def run(
    data: Place | None = None,
    *,
    model: Place | None = None,
    draft_model: Place | None = None,
    output: Place | None = None,
    **options: Unpack[RunOptions],
) -> str: ...


def run(
    data: Any = None,
    *,
    model: Place | None = None,
    draft_model: Place | None = None,
    output: Place | None = None,
    **options: Unpack[RunOptions],
) -> Any:
    """Complete every prompt of `data` in this process, and return when that is done.

    `data` is a pandas or polars DataFrame, a pyarrow Table, or a path as `submit-job --input`
    takes it. `model` decides each token, `draft_model` drafts; these are a job's `verifier` and
    `proposer`.

    A frame comes back as a new one of the same library: its columns, rows and index, and behind
    them the columns of an output (`docs/reference/output.md`). A row that failed has null in
    `text` and its reason in `error`; a `RowsFailedWarning` says how many there are. With `output`
    the completions are written there, and their path is returned. A path as data needs one.

    `options`, by the same names as those of `submit-job`, are fields of the job's spec, as
    `max_tokens`, `prompt_column` or `temperature`. Further ones:

    - `spec`: a spec file, or a mapping as in one; all else overrides it.
    - `settings`: a mapping of settings that win over the `SPECBATCH_` variables.
    - `timeout`: seconds, after which the job is stopped.
    - `progress`: False shows none.
    - `idempotency_key`: a finished job of this key is not done again.

    Ctrl-C raises `JobInterrupted` and leaves a job that the same call resumes. Raises `SpecError`,
    `InputError`, `ModelError` or another `UsageError` before anything starts, `JobFailedError`
    where no row could be completed, `WaitTimeoutError`, and `StoreError`, `ObjectError` or
    `EngineError` for what broke on the way.
    """
    made = asked(model, draft_model, options, RunOptions)
    return _run(Request(data, output, made, output is not None), made, _never)


@overload
async def arun(
    data: Frame,
    *,
    model: Place | None = None,
    draft_model: Place | None = None,
    output: None = None,
    **options: Unpack[RunOptions],
) -> Frame: ...


@overload
async def arun(
    data: Frame,
    *,
    model: Place | None = None,
    draft_model: Place | None = None,
    output: Place,
    **options: Unpack[RunOptions],
) -> str: ...


@overload
async def arun(
    data: Place | None = None,
    *,
    model: Place | None = None,
    draft_model: Place | None = None,
    output: Place | None = None,
    **options: Unpack[RunOptions],
) -> str: ...


async def arun(
    data: Any = None,
    *,
    model: Place | None = None,
    draft_model: Place | None = None,
    output: Place | None = None,
    **options: Unpack[RunOptions],
) -> Any:
    """`run` for programs with an event loop, which continues meanwhile: the job has a thread.

    Cancelling the task stops the job after the current step, and the same call resumes it.
    """
    made = asked(model, draft_model, options, RunOptions)
    request, stop = Request(data, output, made, output is not None), threading.Event()
    work = asyncio.ensure_future(asyncio.to_thread(_run_in_thread, request, made, stop.is_set))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stop.set()
        with suppress(Exception):  # the caller is told of the cancellation and of nothing else
            await work
        raise


def _never() -> bool:
    return False


def _run_in_thread(request: Request, made: Asked, wants_stop: Callable[[], bool]) -> Any:
    try:
        return _run(request, made, wants_stop)
    except JobInterrupted:
        return None  # nobody waits: the task was cancelled. A task that raises it ends the loop.


def _run(request: Request, made: Asked, wants_stop: Callable[[], bool]) -> Any:
    settings = settings_of({**made.settings, "broker_url": IN_MEMORY})
    if request.library is None:
        check_input_here(request.spec.input)
    check_models_first(request.spec)
    quieten_libraries()
    objects = Objects.of_settings(settings)
    with client(settings) as c:
        order = request.order(c, settings, objects, made.idempotency_key)
        sampling = order.spec.sampling
        watcher = Watcher(
            lambda: view_of(made.progress, sampling.n, sampling.max_tokens), remark, wants_stop
        )
        job = _done(c, settings, order, watcher, made.timeout)
        result: Any = data_uri(job.output_uri, job.state)
        if request.library is not None and not request.whole:
            result = _frame_of(request.data, request.library, job, objects)
        if order.frame_file is not None and job.state is JobState.DONE:
            with suppress(ObjectError):  # it is not needed: `specbatch retry` has nothing to read
                objects.delete(order.frame_file)
        _warn(c, job)
        return result


def _done(
    c: Client, settings: Settings, order: Order, watcher: Watcher, timeout_sec: float | None
) -> JobRow:
    """The order's job, once it has ended with an output. Raises `JobFailedError`."""
    check_place(settings, order.spec)
    check_job(settings, order.spec, order.key, c.is_keys_job)
    job, created = c.submit(order.spec, order.key)
    if not created and not job.state.is_final:
        watcher.remark(f"job {job.job_id} was begun by the same call: it resumes here")
    run_job(settings, order.spec, job, watcher, timeout_sec, AGAIN)
    job = c.job(job.job_id)
    if job.state is JobState.FAILED:
        reason = job.error or "see `specbatch show`"
        raise JobFailedError(f"job {job.job_id} failed: {reason}", job_id=job.job_id)
    return job


def _frame_of(frame: Any, library: str, job: JobRow, objects: Objects) -> Any:
    from specbatch.pipeline.outputs.outputs import read_output

    completions = read_output(job.output_uri, objects, job.job_id)
    scored = bool((job.spec.get("output") or {}).get("best_by"))
    return with_completions(frame, library, completions, job.stop_reason or "cancelled", scored)


def _warn(c: Client, job: JobRow) -> None:
    """Say through `warnings` that the job has not completed all rows."""
    if job.state is JobState.DONE:
        return
    progress = c.progress(job.job_id)
    words = f"{progress.rows_failed:,} of {progress.rows_total:,} rows failed; `error` says why"
    if job.state is JobState.CANCELLED:
        words = (
            f"job {job.job_id} was stopped ({job.stop_reason or 'on request'}) with "
            f"{progress.rows_done - progress.rows_failed:,} of {progress.rows_total:,} rows done; "
            f"`specbatch retry {job.job_id} --local` does the rest"
        )
    warnings.warn(words, RowsFailedWarning, stacklevel=4)
