"""`specbatch purge`: what is kept of old jobs' texts is emptied; figures and the audit log stay."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import complain, err, remark, say
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.purging import Due, Purger
from specbatch.schemas.errors import ObjectError, UsageError
from specbatch.schemas.records import JobRow

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

    Interrupted, it goes on where it was when it is run again. Where a job's files cannot be
    reached, its texts are emptied all the same, and the next purge tries the files again; the exit
    code is 4.
    """
    settings = load_settings()
    store = make_store(settings)
    try:
        purger = Purger.of_settings(settings, store)
        due = _due(purger, tenant, older_than, job)
        failures = _Failures()
        if dry_run:
            for one in due:
                say(f"would purge job {one.job.job_id} ({one.job.name}; {one.why})")
            for row in [] if job else purger.left_behind(failed=failures.note):
                say(f"would delete the files of job {row.job_id}, whose texts are not kept")
        else:
            done = _purge_all(purger, due, output, failures)
            say(f"{done.jobs:,} job{'s' if done.jobs != 1 else ''} purged, {done.rows:,} rows")
            cleared = 0 if job else _clear_all(purger, failures)
            if cleared:
                remark(f"files of {cleared:,} jobs whose texts are not kept were left, and deleted")
        if failures.job_ids:
            raise typer.Exit(ObjectError.exit_code)
    finally:
        store.close()


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


@dataclass(slots=True)
class _Done:
    """What a run did."""

    jobs: int = 0
    rows: int = 0
    one_of: dict[str, str] = field(default_factory=dict)  # a job by tenant


class _Failures:
    """Jobs whose files cannot be reached, each told of once: the others need not wait for them."""

    def __init__(self) -> None:
        self.job_ids: set[str] = set()

    def note(self, job: JobRow, error: ObjectError) -> None:
        if job.job_id not in self.job_ids:
            complain(f"job {job.job_id} keeps files, which the next purge tries again: {error}")
            self.job_ids.add(job.job_id)

    def note_past(self, job: JobRow, error: ObjectError, purged: str) -> None:
        complain(
            f"job {job.job_id} keeps a file of outputs to draft from, some of which are purged: "
            f"{error}; `specbatch purge --job {purged}` tries it again"
        )
        self.job_ids.add(job.job_id)


def _purge_all(purger: Purger, due: Iterable[Due], output: bool, failures: _Failures) -> _Done:
    """All jobs, and then what their tenants' others have of them."""
    done = _Done()
    for one in due:
        rows, error = _purge(purger, one, output)
        done.rows += rows
        done.jobs += error is None
        done.one_of[one.job.tenant] = one.job.job_id
        if error is not None:
            failures.note(one.job, error)
    for tenant, job_id in done.one_of.items():
        purger.forget_past(tenant, partial(failures.note_past, purged=job_id))
    return done


def _clear_all(purger: Purger, failures: _Failures) -> int:
    """Of how many jobs files that should have been gone are deleted."""
    cleared = 0
    for row in purger.left_behind(failed=failures.note):
        try:
            cleared += bool(purger.clear(row))
        except ObjectError as error:
            failures.note(row, error)
    return cleared


def _purge(purger: Purger, due: Due, output: bool) -> tuple[int, ObjectError | None]:
    """Rows that were still to do, and what files could not go for; a bar on a terminal."""
    begun, done = None, 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(f"job {due.job.job_id}", total=due.job.rows_total or None)
        try:
            for done in purger.purge(due, output):
                begun = done if begun is None else begun
                bar.update(task, completed=done)
        except ObjectError as error:
            return done - (begun or 0), error
    return done - (begun or 0), None
