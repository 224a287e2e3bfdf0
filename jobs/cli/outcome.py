"""How a job ended, for people and for programs."""

from __future__ import annotations

from typing import NoReturn

import typer

from specbatch.jobs.cli.console import complain, out, remark, say, say_json
from specbatch.pipeline.observe.terminal.progress import INTERRUPTED
from specbatch.pipeline.observe.terminal.summary import summary_table
from specbatch.pipeline.operations.summaries import summary_of
from specbatch.pipeline.runtime.client import Client
from specbatch.schemas.audit import data_uri
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.records import JobRow, JobState

ROWS_COUNT = (
    "(row numbers count from 0, through all files; blank lines of JSONL and CSV do not count)"
)
EXIT_CODES = {JobState.PARTIAL: 3, JobState.FAILED: 4, JobState.CANCELLED: 5}


def as_json(job: JobRow, progress: JobProgress, interrupted: bool = False) -> dict[str, object]:
    """The object that `--json` prints."""
    return {
        "job": job.job_id,
        "name": job.name,
        "state": INTERRUPTED if interrupted else str(progress.state),
        "rows": progress.rows_total,
        "rows_failed": progress.rows_failed,
        "tokens": progress.completion_tokens,
        "acceptance_rate": progress.acceptance_rate,
        "cost_usd": progress.cost_usd,
        "output": job.output_uri,
        "data": data_uri(job.output_uri, progress.state),
    }


def known_by_key(job: JobRow, so: str, local: bool = False) -> str:
    """A remark on a job that its idempotency key has made before. `so`: what follows from that.
    `local`: this command is its worker."""
    known = f"job {job.job_id} is known by this key and {job.state}: {so}"
    if not job.state.is_final:
        return known
    if job.state is JobState.DONE:
        return f"{known}; to do its rows again, name another key and another output"
    here = " --local" if local else ""
    return f"{known}; `specbatch retry {job.job_id}{here}` does what it left undone"


def finish(client: Client, job_id: str, json: bool, otherwise: int = 0) -> NoReturn:
    """Print how the job stands and leave with the exit code of its state; `otherwise`, if that
    is 0."""
    job = client.job(job_id)
    if json:
        say_json(as_json(job, client.progress(job_id)))
    else:
        print_summary(client, job_id)
        say(f"output: {job.output_uri}")
        if (data := data_uri(job.output_uri, job.state)) is not None:
            say(f"data:   {data}")
    leave(job, otherwise)


def print_summary(client: Client, job_id: str) -> None:
    """The table of the job's figures."""
    job, progress = client.job(job_id), client.progress(job_id)
    out.print(summary_table(summary_of(job, progress, usd=client.spent_usd(job.job_id))))


def leave(job: JobRow, otherwise: int = 0) -> NoReturn:
    """End the command with the exit code of the job's state, after a word about what went wrong."""
    if job.state is JobState.FAILED:
        complain(f"job {job.job_id} failed: {job.error or 'see `specbatch show`'}")
    elif job.state is JobState.PARTIAL:
        remark(f"some rows failed: `specbatch results {job.job_id} --failed` says why")
    elif job.state is JobState.CANCELLED:
        reason = f" ({job.stop_reason})" if job.stop_reason else ""
        remark(
            f"job {job.job_id} was stopped{reason}; its finished rows are in the output. "
            f"`specbatch retry {job.job_id}` does the rest, and so does the remainder's spec there"
        )
        if job.error:
            complain(job.error)
    raise typer.Exit(EXIT_CODES.get(job.state, otherwise))
