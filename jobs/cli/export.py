"""`specbatch export JOB`: what is kept of a job, as Parquet for other tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated

import typer
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from specbatch.jobs.cli import options as o
from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import err, remark, say, say_json
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.operations.tools import make_exporter
from specbatch.schemas.exports import Exported, ExportKind, ExportOrder, Selection, kind_of


def export(
    job: o.JobId,
    what: Annotated[str, typer.Option("--what", help=f"the set: {', '.join(ExportKind)}")],
    to: Annotated[
        str,
        typer.Option(
            "--to", help="a file in .parquet, or a folder or s3:// prefix for numbered parts"
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
        bool, typer.Option("--so-far", help="also of a job that has not ended: what is finished")
    ] = False,
    json: o.Json = False,
) -> None:
    """Write completions, tokens, corrections, costs or device time of a job as Parquet."""
    chosen = Selection(proposer, tag, min_rejections)
    order = ExportOrder(kind_of(what), to, chosen, overwrite, so_far)
    settings = load_settings()
    store = make_store(settings)
    try:
        exporter = make_exporter(settings, store)
        with _progress() as told:
            done = exporter.export(job, order, told)
    finally:
        store.close()
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


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, where that is a terminal."""
    columns = (TextColumn("exporting"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda read, total: bar.update(task, completed=read, total=total)
