"""`specbatch retry JOB`: what failed or was cancelled is done again, and nothing else."""

from __future__ import annotations

from typing import Annotated

import typer

from specbatch.jobs.cli import options as o
from specbatch.jobs.cli.connect import client, load_settings
from specbatch.jobs.cli.console import remark, say, say_json
from specbatch.jobs.cli.outcome import EXIT_CODES, finish
from specbatch.pipeline.operations.tools import models_now
from specbatch.pipeline.runtime.client import Client
from specbatch.schemas.errors import UsageError
from specbatch.schemas.fingerprint import Models, shown
from specbatch.schemas.numeric_class import engine_of
from specbatch.schemas.records import JobRow, JobState
from specbatch.schemas.settings import VLLM, Settings
from specbatch.schemas.spec import spec_of
from specbatch.schemas.timekeeping import LEASES_OF_SILENCE


def retry(
    job: o.JobId,
    local: Annotated[
        bool, typer.Option("--local", help="work in this process until the job ends")
    ] = False,
    quarantined: Annotated[
        bool,
        typer.Option("--quarantined", help="only rows that failed by themselves, by all attempts"),
    ] = False,
    numeric_class: Annotated[
        str | None,
        typer.Option(
            "--numeric-class",
            help="verify what is left in this class: exact/f32/1, or another that workers have",
            show_default=False,
        ),
    ] = None,
    accept_model: Annotated[
        bool,
        typer.Option(
            "--accept-model",
            help="accept the model's current files: those here, or those of the workers",
        ),
    ] = False,
    engine: o.Engine = None,
    timeout: o.Timeout = None,
    json: o.Json = False,
) -> None:
    """Send a job's failed and cancelled groups, or only its quarantined rows, back to work.

    With --local, resume it in this process. With --numeric-class or --accept-model, a running job
    moves to workers of that class or with those files; groups already started start again there.
    """
    if timeout is not None and not local:
        raise UsageError("--timeout needs --local: without it nothing is waited for")
    o.check_engine_here(engine, local)
    settings = load_settings()
    with client(settings) as c:
        row = c.job(job)
        is_done = row.state is JobState.DONE  # then no model is needed, and none has to be there
        models = _accepted(settings, c, row, local) if accept_model and not is_done else None
        changes = numeric_class is not None or models is not None
        going_on = local and not quarantined and not row.state.is_final and not changes
        count = 0 if going_on else c.retry(row.job_id, quarantined, numeric_class, models)
        if not local:
            _print_result(settings, row, count, json)
            return
        if row.state.is_final and not count and not json:
            say(_found(row, count))
            raise typer.Exit(EXIT_CODES.get(row.state, 0))
        if not going_on:
            remark(_found(row, count))
        from specbatch.jobs.cli.local import run_here

        row = c.job(row.job_id)
        if not row.state.is_final:
            here = o.with_engine(settings, engine or _engine_of(row))
            run_here(here, spec_of(row), row, timeout)
        finish(c, row.job_id, json)


def _engine_of(row: JobRow) -> str | None:
    """The engine that a job's class needs; None: what is set."""
    return VLLM if engine_of(row.numeric_class) == VLLM else None


def _accepted(settings: Settings, c: Client, row: JobRow, local: bool) -> Models:
    """The models as they are now: in their folders here, or as the workers have them.

    Raises `UsageError` unless all workers have the same, and other files than the job.
    """
    if local:
        return models_now(spec_of(row))
    found = c.models_alive(row.job_id, LEASES_OF_SILENCE * settings.lease_sec)
    if not found:
        raise UsageError(
            f"no live worker has model `{row.verifier}` with other files than job {row.job_id}: "
            "start one that has, or resume the job in this process with --local"
        )
    if len(found) > 1:
        there = ", ".join(shown(models.verifier.digest) for models in found)
        raise UsageError(
            f"live workers have several versions of model `{row.verifier}` ({there}): stop those "
            "with the wrong version"
        )
    return found[0]


def _print_result(settings: Settings, row: JobRow, count: int, json: bool) -> None:
    """What was sent back to work elsewhere."""
    if json:
        say_json({"job": row.job_id, "units": count})
    else:
        say(_found(row, count))
    if count and settings.broker_url.startswith("memory://"):
        remark(
            "the broker is memory://, which no other process can hear: "
            f"`specbatch retry {row.job_id} --local` does the work here"
        )


def _found(row: JobRow, count: int) -> str:
    if count:
        return f"job {row.job_id}: {count} unit{'s' if count != 1 else ''} back to work"
    nothing = f"job {row.job_id} is {row.state}: nothing to retry"
    if row.state is JobState.DONE:
        return f"{nothing}; to do its rows again, submit a new job with another output"
    return (
        f"{nothing}: `specbatch results {row.job_id} --failed` says what failed; a row that was "
        "refused when it was read needs a corrected input, an output without its form more "
        "max_tokens or `output.malformed`"
    )
