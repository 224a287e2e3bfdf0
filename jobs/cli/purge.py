"""`specbatch purge`: what is kept of old jobs' texts is emptied; figures and the audit log stay."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import closing
from typing import Annotated

import typer

from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import complain, progress_bar, remark, say
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.runtime.purge import Due, Purger
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
        failures = _Failures(_again(job, output))
        if dry_run:
            for one in due:
                say(f"would purge job {one.job.job_id} ({one.job.name}; {one.why})")
            for row in [] if job else purger.left_behind(failed=failures.note):
                say(f"would delete the files of job {row.job_id}, whose texts are not kept")
        else:
            jobs, rows = _purge_all(purger, due, output, failures, is_listed=job is None)
            say(f"{jobs:,} job{'s' if jobs != 1 else ''} purged, {rows:,} rows")
            cleared = 0 if job else _clear_all(purger, failures)
            if cleared:
                remark(f"files of {cleared:,} jobs whose texts are not kept were left, and deleted")
        if failures.job_ids:
            raise typer.Exit(ObjectError.exit_code)


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


class _Failures:
    """Jobs whose files cannot be reached, each reported once: the others need not wait for them."""

    def __init__(self, again: str) -> None:
        self.job_ids: set[str] = set()
        self._again = again  # who tries again

    def note(self, job: JobRow, error: ObjectError) -> None:
        if job.job_id not in self.job_ids:
            complain(f"could not delete files of job {job.job_id}; {self._again} retries: {error}")
            self.job_ids.add(job.job_id)

    def note_past(self, job: JobRow, error: ObjectError) -> None:
        complain(
            f"could not delete the history file of job {job.job_id}, which has purged outputs; "
            f"{self._again} retries: {error}"
        )
        self.job_ids.add(job.job_id)


def _again(job: str | None, output: bool) -> str:
    """What tries again what could not be deleted: a job that was named may not be due yet."""
    if job is not None:
        return f"`specbatch purge --job {job}{' --output' if output else ''}`"
    return "the next purge with --output" if output else "the next purge"


def _purge_all(
    purger: Purger, due: Iterable[Due], output: bool, failures: _Failures, is_listed: bool
) -> tuple[int, int]:
    """All jobs, then what their tenants' others have of them; only then they are due no more.

    A job of a list may have been sent back to work since. Returns how many jobs and rows it purged.
    """
    jobs = rows = 0
    seen: set[str] = set()
    to_finish: dict[str, list[Due]] = {}  # by tenant
    for one in due:
        try:
            done, error = _purge(purger, one, output)
        except UsageError as refused:
            if not is_listed:
                raise
            remark(f"job {one.job.job_id} is left as it is: {refused}")
            continue
        rows += done
        seen.add(one.job.job_id)
        of_tenant = to_finish.setdefault(one.job.tenant, [])
        if error is None:
            of_tenant.append(one)
        else:
            failures.note(one.job, error)
    for tenant, of_tenant in to_finish.items():
        if purger.forget_past(tenant, seen, failures.note_past):
            for one in of_tenant:
                purger.finish(one)
            jobs += len(of_tenant)
    return jobs, rows


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
    with progress_bar(f"job {due.job.job_id}", due.job.rows_total or None) as update:
        try:
            for done in purger.purge(due, output):
                begun = done if begun is None else begun
                update(completed=done)
        except ObjectError as error:
            return done - (begun or 0), error
    return done - (begun or 0), None
