"""`specbatch export JOB`: what is kept of a job, as Parquet for other tools."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from typing import Annotated

import typer
from rich.filesize import decimal

from specbatch.jobs.cli import options as o
from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import progress_bar, remark, say, say_json
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.operations.tools import make_exporter
from specbatch.schemas.exports import Exported, ExportKind, ExportOrder, Selection, kind_of


def export(
    job: o.JobId,
    what: Annotated[str, typer.Option("--what", help=f"the set: {', '.join(ExportKind)}")],
    to: Annotated[
        str,
        typer.Option(
            "--to", help="a file ending in .parquet, or a folder or s3:// prefix for numbered parts"
        ),
    ],
    proposer: Annotated[
        str | None,
        typer.Option("--proposer", help="corrections: only of drafts by this one"),
    ] = None,
    tag: Annotated[
        str | None, typer.Option("--tag", help="corrections: only rows with this tag")
    ] = None,
    min_rejections: Annotated[
        int | None,
        typer.Option(
            "--min-rejections",
            help="corrections: only completions with at least this many; default 1",
            min=0,
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace an export that is there")
    ] = False,
    so_far: Annotated[
        bool,
        typer.Option("--so-far", help="also export a job that has not ended: its finished rows"),
    ] = False,
    json: o.Json = False,
) -> None:
    """Write completions, tokens, corrections, costs or device time of a job as Parquet."""
    chosen = Selection(proposer, tag, min_rejections)
    order = ExportOrder(kind_of(what), to, chosen, overwrite, so_far)
    settings = load_settings()
    with closing(make_store(settings)) as store, progress_bar("exporting") as update:
        done = make_exporter(settings, store).export(
            job, order, lambda read, total: update(completed=read, total=total)
        )
    for line in done.remarks:
        remark(line)
    if json:
        say_json(as_json(done))
    else:
        files = f"{len(done.files)} file{'s' if len(done.files) != 1 else ''}"
        size = decimal(done.size_bytes)
        say(f"{done.kind} of job {done.job_id}: {done.rows:,} rows, {size} in {files}: {done.to}")


def as_json(done: Exported) -> dict[str, object]:
    """The object that `--json` prints."""
    return {
        "job": done.job_id,
        "what": done.kind.value,
        "to": done.to,
        "rows": done.rows,
        "bytes": done.size_bytes,
        "files": [asdict(file) for file in done.files],
        "left_out": dict(done.left_out),
    }
