"""`specbatch purge`: what is kept of old jobs' texts is emptied; figures and the audit log stay."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, closing
from typing import Annotated

import typer

from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import complain, progress_bar, remark, say
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.operations.purging import Failures, Purging
from specbatch.pipeline.runtime.purge import Due, Purger
from specbatch.schemas.days import DAY_SEC
from specbatch.schemas.errors import ObjectError, UsageError

_AGE = re.compile(r"(\d+(?:\.\d+)?)([dhm]?)")
_SEC = {"d": DAY_SEC, "": DAY_SEC, "h": 3600.0, "m": 60.0}


def purge(
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="only this tenant's jobs", show_default=False)
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than",
            help="jobs that ended this long ago or longer: 30d, 12h; default: tenants' retention",
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
    """Delete the stored texts of ended jobs; counts, costs and the audit log stay.

    An interrupted purge resumes when you run it again. If a job's files cannot be reached, its
    texts in the store are deleted anyway, and the next purge (of outputs: the next one with
    --output) tries the files again; the exit code is 4.
    """
    settings = load_settings()
    with closing(make_store(settings)) as store:
        purger = Purger.of_settings(settings, store)
        due = _due(purger, tenant, older_than, job)
        failures = Failures(_again(job, output), complain)
        if dry_run:
            for one in due:
                say(f"would purge job {one.job.job_id} ({one.job.name}; {one.why})")
            for row in [] if job else purger.left_behind(failed=failures.note):
                say(f"would delete the files of job {row.job_id}, whose texts are not kept")
        else:
            purging = Purging(purger, failures, output, remark, _bar)
            say(purging.all_of(due, is_listed=job is None).sentence)
            cleared = 0 if job else purging.clear_all()
            if cleared:
                remark(f"files of {cleared:,} jobs whose texts are not kept were left, and deleted")
        if failures.job_ids:
            raise typer.Exit(ObjectError.exit_code)


def _bar(due: Due) -> AbstractContextManager[Callable[..., None]]:
    return progress_bar(f"job {due.job.job_id}", due.job.rows_total or None)


def seconds_of(age: str) -> float:
    """`30d`, `12h`, `90m`; a bare number is days. Raises `UsageError`."""
    found = _AGE.fullmatch(age.strip())
    if found is None:
        raise UsageError(f"--older-than {age!r} is not an age: write 30d, 12h or 90m")
    return float(found[1]) * _SEC[found[2]]


def _due(
    purger: Purger, tenant: str | None, older_than: str | None, job: str | None
) -> Iterable[Due]:
    if job is None:
        return purger.due(tenant, None if older_than is None else seconds_of(older_than))
    if tenant is not None or older_than is not None:
        raise UsageError("--job names one job: leave --tenant and --older-than out")
    return [purger.asked_for(job)]


def _again(job: str | None, output: bool) -> str:
    """What tries again what could not be deleted: a job that was named may not be due yet."""
    if job is not None:
        return f"`specbatch purge --job {job}{' --output' if output else ''}`"
    return "the next purge with --output" if output else "the next purge"
