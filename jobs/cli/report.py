"""`specbatch report JOB`: all figures of a job as one HTML file."""

from __future__ import annotations

import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from specbatch.jobs.cli.console import progress_bar, say, say_json
from specbatch.jobs.cli.options import JobId, Json
from specbatch.jobs.cli.stores import found_settings
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.observe.report.page import page
from specbatch.pipeline.operations.report import gather
from specbatch.schemas.errors import OutputError


def report(
    job: JobId,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", help="the file to write; report-JOB.html if not given", show_default=False
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", help="outputs to show token by token", min=0, max=100)
    ] = 6,
    texts: Annotated[
        bool,
        typer.Option("--texts/--no-texts", help="whether prompts and outputs may be in it at all"),
    ] = True,
    json: Json = False,
) -> None:
    """Write a job's report: one HTML file with its costs, figures, decisions and some outputs."""
    settings = found_settings()
    with closing(make_store(settings)) as store:
        row = store.get_job(job)
        path = output or Path(f"report-{row.job_id}.html")
        if not path.name or path.is_dir():
            raise OutputError(f"--output {path} is a folder: name a file in it")
        with progress_bar("reading completions") as update:
            made = page(
                gather(
                    *(store, settings, row.job_id, samples, time.time(), texts),
                    lambda read, total: update(completed=read, total=total),
                )
            )
    size = write_page(path, made)
    if json:
        say_json({"job": row.job_id, "output": str(path), "bytes": size})
    else:
        say(f"report of job {row.job_id}: {path} ({decimal(size)})")


def write_page(path: Path, text: str) -> int:
    """Whole or not at all: beside its place first. Raises `OutputError`."""
    data = text.encode("utf-8", errors="replace")
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise OutputError(f"the report cannot be written to {path}: {error.strerror}") from None
    return len(data)
