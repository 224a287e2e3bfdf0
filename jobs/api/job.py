"""A job of a store: its state, its results, its report; waiting for it and stopping it."""

from __future__ import annotations

import getpass
import time
from contextlib import suppress
from html import escape
from typing import TYPE_CHECKING

from specbatch.jobs.api.progress import view_of
from specbatch.jobs.api.report import Report
from specbatch.jobs.cli.remote import tell_waiting, watch
from specbatch.jobs.client import JobClient, Outcome
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.observe.terminal.progress import INTERRUPTED
from specbatch.pipeline.runtime.client import Client as Jobs
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.errors import OutputError
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.records import JobRow
from specbatch.schemas.settings import Settings

if TYPE_CHECKING:
    import pyarrow as pa


class Job:
    """A job of a `Client`'s store. Everything is asked for anew; nothing is remembered.

    Methods raise `StoreError` where the store cannot be reached.
    """

    def __init__(self, settings: Settings, store: Store, jobs: Jobs, job_id: str) -> None:
        self._settings, self._store, self._jobs = settings, store, jobs
        self._id = job_id

    @property
    def id(self) -> str:
        return self._id

    @property
    def name(self) -> str:
        return self._row().name

    @property
    def status(self) -> str:
        """queued, running, interrupted (begun, and nobody works on it), done, partial (some rows
        failed), failed or cancelled."""
        row = self._row()
        is_left = self._jobs.interrupted([row], self._settings.lease_sec)
        return INTERRUPTED if is_left else str(row.state)

    @property
    def output(self) -> str:
        """The folder or prefix of the output, with its manifest."""
        return self._row().output_uri

    def progress(self) -> JobProgress:
        """Counts of rows, groups and tokens, and the cost so far."""
        return self._jobs.progress(self._id)

    def outcome(self) -> Outcome:
        """All figures of the job, and where its completions are; before its end, those so far."""
        return JobClient(self._store, self._jobs).outcome(self._id)

    def wait(self, timeout: float | None = None, *, progress: bool = True) -> Job:
        """Return this job once it has ended; `timeout` is in seconds.

        Ctrl-C ends the waiting, not the job. Raises `WaitTimeoutError`; the job then continues.
        """
        row = self._row()
        if row.state.is_final:
            return self
        said = tell_waiting(self._settings, self._jobs, row)
        sampling = row.spec.get("sampling") or {}  # an encrypted spec shows none
        samples, most = sampling.get("n") or 1, sampling.get("max_tokens")
        with view_of(progress, samples, most) as show:
            watch(self._settings, self._jobs, row, show, timeout, said)
        return self

    def results(self) -> pa.Table:
        """The completions, with the columns of `docs/reference/output.md`, in input order.

        `.to_pandas()` and `polars.from_arrow` turn them into frames. Raises `OutputError` where
        none were published, or not yet, and `ObjectError` for damaged ones.
        """
        row = self._row()
        if not row.state.has_output:
            why = "it has not ended" if not row.state.is_final else row.error or "see its report"
            raise OutputError(f"job {self._id} is {self.status} and has no results: {why}")
        from specbatch.pipeline.outputs.outputs import read_output

        return read_output(row.output_uri, Objects.of_settings(self._settings), row.job_id)

    def report(self, *, samples: int = 6, texts: bool = True) -> Report:
        """Costs, figures and decisions as a page, with `samples` outputs token by token.

        `texts`: whether prompts and outputs may be in it. Raises `MissingExtraError` without
        jinja2.
        """
        from specbatch.pipeline.observe.report.page import page
        from specbatch.pipeline.operations.report import gather

        facts = gather(self._store, self._settings, self._id, samples, time.time(), texts)
        return Report(self._id, page(facts))

    def cancel(self, reason: str | None = None) -> None:
        """Ask the job to stop: finished rows are kept and published. `reason` says who asked."""
        self._jobs.cancel(self._id, reason or f"cancelled by {_who()}")

    def retry(self) -> int:
        """Send what failed or was cancelled back to workers; how many units that is.

        `specbatch retry JOB --local` does it in its own process. Raises `UsageError` for a job
        that has not ended.
        """
        return self._jobs.retry(self._id)

    def _row(self) -> JobRow:
        return self._jobs.job(self._id)

    def __repr__(self) -> str:
        return f"<Job {self._id} {self.name!r} {self.status}>"

    def _repr_html_(self) -> str:
        done = self.progress()
        cells = (self._id, self.name, self.status, f"{done.rows_done:,} of {done.rows_total:,}")
        names = ("job", "name", "status", "rows")
        head = "".join(f"<th>{name}</th>" for name in names)
        body = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        return f"<table><tr>{head}</tr><tr>{body}</tr></table>"


def _who() -> str:
    with suppress(KeyError, OSError):  # a container's user may have no name
        return getpass.getuser()
    return "a user without a name"
