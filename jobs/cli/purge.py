"""`specbatch purge`: what is kept of old jobs' texts is emptied; figures and the audit log stay."""

from __future__ import annotations

import re
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import err, remark, say
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.ledger.rules import check_purge
from specbatch.pipeline.purging import Due, Purger
from specbatch.schemas.errors import UsageError

_AGE = re.compile(r"(\d+(?:\.\d+)?)([dhm]?)")
_SEC = {"d": 86_400.0, "": 86_400.0, "h": 3600.0, "m": 60.0}


def purge(
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="only this tenant's jobs", show_default=False)
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than",
            help="jobs that ended so long ago: 30d, 12h; default: their tenants' retention",
            show_default=False,
        ),
    ] = None,
    job: Annotated[
        str | None, typer.Option("--job", help="this job, whatever its age", show_default=False)
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="say what would be purged, and change nothing")
    ] = False,
    output: Annotated[
        bool, typer.Option("--output", help="delete the files of the jobs' outputs as well")
    ] = False,
) -> None:
    """Empty what is kept of ended jobs' texts; counts, costs and the audit log stay.

    Interrupted, it goes on where it was when it is run again.
    """
    settings = load_settings()
    store = make_store(settings)
    try:
        purger = Purger.of_settings(settings, store)
        due = _due(purger, tenant, older_than, job)
        left = [] if job else purger.left_behind()
        if dry_run:
            for one in due:
                say(f"would purge job {one.job.job_id} ({one.job.name}; {one.why})")
            for row in left:
                say(f"would delete the files of job {row.job_id}, whose texts are not kept")
            return
        for row in left:
            purger.clear(row)
        rows = sum(_purge(purger, one, output) for one in due)
        say(f"{len(due):,} job{'s' if len(due) != 1 else ''} purged, {rows:,} rows")
        if left:
            remark(f"files of {len(left):,} jobs whose texts are not kept were left, and deleted")
    finally:
        store.close()


def seconds_of(age: str) -> float:
    """`30d`, `12h`, `90m`; a bare number is days. Raises `UsageError`."""
    found = _AGE.fullmatch(age.strip())
    if found is None:
        raise UsageError(f"--older-than {age!r} is not an age: write 30d, 12h or 90m")
    return float(found[1]) * _SEC[found[2]]


def _due(purger: Purger, tenant: str | None, older_than: str | None, job: str | None) -> list[Due]:
    if job is None:
        return purger.due(tenant, None if older_than is None else seconds_of(older_than))
    if tenant is not None or older_than is not None:
        raise UsageError("--job names one job: leave --tenant and --older-than out")
    row = purger.store.get_job(job)
    check_purge(row)
    return [Due(row, "asked for")]


def _purge(purger: Purger, due: Due, output: bool) -> int:
    """How many rows; a bar on a terminal."""
    done = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(f"job {due.job.job_id}", total=due.job.rows_total or None)
        for done in purger.purge(due, output):
            bar.update(task, completed=done)
    return done
