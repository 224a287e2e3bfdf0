"""What a job has come to, row by row: from its output if that is published, else from the store.

The output is complete, whatever the job's privacy. The store has what its privacy mode keeps, and
nothing after a purge; `lacks` says so in a sentence.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.outputs.outputs import Manifest, read_manifest
from specbatch.pipeline.outputs.parts import Columns, OutputRow, columns_of_job
from specbatch.pipeline.outputs.rows import (
    ComparedRow,
    Row,
    chosen,
    column_names,
    compared,
    compared_rows,
    read_rows,
)
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.audit import data_uri
from specbatch.schemas.errors import ObjectError, OutputError, UsageError
from specbatch.schemas.privacy import NOT_KEPT, PrivacyMode
from specbatch.schemas.records import CompletionRecord, JobRow, JobState

PAGE_ROWS = 200  # of the store at once


@dataclass(frozen=True, slots=True)
class Results:
    """The rows of one job, and where they are."""

    job: JobRow
    store: Store
    objects: Objects
    manifest: Manifest | None  # None: they are read from the store
    remarks: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The folder or prefix that is read, or that it is the store."""
        return str(data_uri(self.job.output_uri, JobState.DONE)) if self.manifest else "the store"

    @property
    def lacks(self) -> str | None:
        """What of the rows is not there, in a sentence; None: they are complete."""
        job = self.job
        if self.manifest is not None:
            return None
        if job.purged_at is not None:
            when = datetime.fromtimestamp(job.purged_at, UTC).strftime("%Y-%m-%d")
            return f"texts and token ids of job {job.job_id} are gone: it was purged on {when}"
        if job.privacy is PrivacyMode.HASH_ONLY:
            return (
                f"the store keeps no texts and no token ids of job {job.job_id}, and only hashes "
                "of its row ids: its privacy is hash-only"
            )
        if job.privacy is PrivacyMode.REDACTED:
            return (
                f"the store keeps texts of job {job.job_id} with marks in place of personal data: "
                "its privacy is redacted"
            )
        return None

    def columns(self) -> list[str]:
        """Names of the columns, kept ones of the input among them if the output is read."""
        if self.manifest is None:
            return list(self._own.schema.names)
        return column_names(self.objects, self.job.output_uri, self.manifest)

    @property
    def _own(self) -> Columns:
        """What an output of the job has, without columns of the input."""
        return columns_of_job(bool((self.job.spec.get("output") or {}).get("best_by")))

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        """The rows with all columns, or with these. Raises `UsageError` for an unknown column."""
        if columns is not None:
            self._check(columns)
        if self.manifest is not None:
            return read_rows(self.objects, self.job.output_uri, self.manifest, columns)
        return (chosen(row, columns) for row in self._stored())

    def compared(self) -> Iterator[ComparedRow]:
        """The rows, as far as two jobs are compared by them."""
        if self.manifest is not None:
            return compared_rows(self.objects, self.job.output_uri, self.manifest)
        return map(compared, self._stored())

    def _check(self, columns: Sequence[str]) -> None:
        there = self.columns()
        if unknown := next((name for name in columns if name not in there), None):
            kept = "" if self.manifest else "; columns of the input are only in a published output"
            raise UsageError(
                f"there is no column `{unknown}` in {self.where}: there are {', '.join(there)}"
                f"{kept}"
            )

    def _stored(self) -> Iterator[Row]:
        job_id = self.job.job_id
        inputs: list[Iterator[OutputRow]] = [
            self.store.completions(job_id, PAGE_ROWS, details=False),
            self.store.rejected(job_id),
        ]
        return map(self._as_kept, heapq.merge(*inputs, key=attrgetter("row_index")))

    def _as_kept(self, row: OutputRow) -> Row:
        """A row of the store as the output would have it, with null for what is not kept."""
        values = self._own.whole(row)
        is_gone = self.job.purged_at is not None
        if isinstance(row, CompletionRecord) and (is_gone or NOT_KEPT in row.token_ids):
            values["token_ids"] = None
            if is_gone or self.job.privacy is PrivacyMode.HASH_ONLY:
                values["text"] = None
        return values


def results_of(store: Store, objects: Objects, job: JobRow) -> Results:
    """Where the rows of a job are, with a remark if they are not where a user expects them."""
    if not job.state.has_output:
        progress = store.progress(job.job_id)
        if job.state is JobState.FAILED:
            so_far = f"job {job.job_id} failed and has no output: the rows that it finished are"
        else:
            done = f"{progress.rows_done:,} of {progress.rows_total:,} rows are finished"
            so_far = f"job {job.job_id} is {job.state}, {done}: they are"
        return Results(job, store, objects, None, (f"{so_far} read from the store",))
    try:
        manifest = read_manifest(job.output_uri, objects)
    except (ObjectError, OutputError) as error:
        why = str(error)
        if isinstance(error, OutputError):
            why = f"the output of job {job.job_id} is no longer in {job.output_uri}"
        return Results(job, store, objects, None, (f"{why}; rows are read from the store",))
    if manifest.job_id != job.job_id:
        other = f"{job.output_uri} holds the output of job {manifest.job_id} now"
        return Results(job, store, objects, None, (f"{other}; rows are read from the store",))
    return Results(job, store, objects, manifest)
