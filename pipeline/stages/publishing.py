"""What a finished job says: which rows are in its output, and which word ends it."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from specbatch.pipeline.inputs.planner import PlannedGroup, plan
from specbatch.pipeline.inputs.rows import RowChecker
from specbatch.pipeline.inputs.sources import READER_BYTES, open_source
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.outputs.names import MANIFEST
from specbatch.pipeline.outputs.outputs import OutputWriter
from specbatch.pipeline.stages.recorded import recorded, rejected_whole
from specbatch.pipeline.stages.remainder import Remainder, write_remainder
from specbatch.pipeline.stages.text_stop import Decode
from specbatch.pipeline.storage.objects import Objects, join
from specbatch.pipeline.storage.prompts import reader
from specbatch.schemas.audit import Head, PublishedManifest
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.records import (
    FIRST_SPLIT_INDEX,
    CompletionRecord,
    FinishReason,
    JobRow,
    JobState,
    JobWork,
    PromptRow,
    Prompts,
    Stage,
)
from specbatch.schemas.seeds import sample_seed
from specbatch.schemas.spec import JobSpec


@dataclass(frozen=True, slots=True)
class Publisher:
    """Writes outputs, and what is left of stopped jobs beside them."""

    store: Store
    objects: Objects
    decode: Callable[[JobRow], Decode]
    checker: Callable[[JobSpec], RowChecker]
    attempts: int  # that a job has
    reader_bytes: int = READER_BYTES

    def publish(
        self, work: JobWork, job: JobRow, spec: JobSpec, still_mine: Callable[[], None]
    ) -> tuple[JobState, str | None, PublishedManifest]:
        """Everything but the job's end: its state then, an error, and the manifest.

        `still_mine` raises once somebody else publishes the job. Raises `OutputError` and
        `ObjectError`.
        """
        progress = self.store.progress(job.job_id)
        done = None
        if job.privacy.is_full:
            rejected = self.store.rejected(job.job_id)
        else:  # the output is the submitter's and whole, whatever the store keeps
            done = recorded(self.store, self.objects, job, spec, self.decode(job))
            rejected = rejected_whole(self.store, self.objects, job)
        rows: Iterator[CompletionRecord]
        rows = with_unfinished_rows(self.store, self.objects, job, done)
        with self.objects.temp_folder() as folder:
            unread_input = _Unread(self, work, spec)
            left = None
            if job.cancel_requested:
                unread = () if progress.ingest_done else unread_input
                left = self._left(folder, work, job, spec, unread)
            if left is not None:
                never_read = left.unread_rows(spec.sampling.n)
                rows = chain(rows, (r for row in never_read for r in _cancelled(job, row)))
                rejected = chain(rejected, left.newly_quarantined())
            input_format = job.report.get("input_format") or unread_input.format
            manifest = OutputWriter(self.objects, spec.output.uri, job.job_id).write(
                rows,
                rejected,
                openai=(input_format or spec.input.format) == "openai",
                created=int(job.created_at),
                decode=self.decode(job),
                info=_info(job, spec, self.store.log_head(job.job_id)),
                beside=left.files if left is not None else (),
                still_mine=still_mine,
            )
        state, error = final_state(job, progress)
        error = error or (left.problem if left is not None else None)
        uri, sha256 = join(spec.output.uri, MANIFEST), hashlib.sha256(manifest.to_json())
        return state, error, PublishedManifest(uri, sha256.hexdigest())

    def _left(
        self,
        folder: Path,
        work: JobWork,
        job: JobRow,
        spec: JobSpec,
        unread: Iterable[PlannedGroup],
    ) -> Remainder:
        found = unfinished_rows(self.store, self.objects, job)
        unfinished = (row for row, word, _ in found if word == Stage.CANCELLED)
        tries_again = work.lease.attempt < self.attempts
        return write_remainder(folder, job, spec, unfinished, unread, tries_again)


@dataclass(slots=True)
class _Unread:
    """The input from where its reading ended; its `format` once it was opened, which no report has
    of a job that was stopped before. Iterating raises `UsageError` and `ObjectError`."""

    publisher: Publisher
    work: JobWork
    spec: JobSpec
    format: str | None = None

    def __iter__(self) -> Iterator[PlannedGroup]:
        publisher = self.publisher
        source = open_source(self.spec.input, publisher.objects, publisher.reader_bytes)
        self.format = source.format
        checker = publisher.checker(self.spec)
        yield from plan(source, checker, self.spec.group_size, self.work.cursor, self.work.next_row)


def with_unfinished_rows(
    store: Store,
    objects: Objects,
    job: JobRow,
    done: Iterable[CompletionRecord] | None = None,
) -> Iterator[CompletionRecord]:
    """All completions in input order, and one error record per sample of every unfinished row.

    `done` is another source of completions than the store.
    Rows in, rows out: a row of a failed or cancelled group is in the output with its reason.
    """
    return heapq.merge(
        store.completions(job.job_id, details=False) if done is None else done,
        (
            record
            for row, word, error in unfinished_rows(store, objects, job)
            for record in (
                _cancelled(job, row, error)
                if word == Stage.CANCELLED
                else _records(job, row, FinishReason.ERROR, error or word)
            )
        ),
        key=lambda record: (record.row_index, record.sample_index),
    )


def unfinished_rows(
    store: Store, objects: Objects, job: JobRow
) -> Iterator[tuple[PromptRow, str, str]]:
    """(row, failed or cancelled, last error) of every row in a group that has no completions."""
    read = reader(objects, job, files=2)  # of a planned group, and of one that was cut off
    kept = store.kept_rows(job.job_id)
    planned: list[tuple[Prompts, str, str]] = []
    cut_off: list[tuple[Prompts, str, str]] = []
    for index, word, prompts, error in store.failed_groups(job.job_id):
        (planned if index < FIRST_SPLIT_INDEX else cut_off).append((prompts, word, error))
    # Groups were planned in the order of their rows, and are cut in any order.
    by_file = sorted(cut_off, key=lambda group: (group[0].artefact.uri, group[0].row_start))
    firsts = {group[0]: read(group[0])[0].row_index for group in by_file}
    cut_off.sort(key=lambda group: firsts[group[0]])

    def rows(groups: Iterable[tuple[Prompts, str, str]]) -> Iterator[tuple[PromptRow, str, str]]:
        for prompts, word, error in groups:
            for row in read(prompts):
                if row.row_index not in kept:
                    yield row, word, error

    return heapq.merge(rows(planned), rows(cut_off), key=lambda found: found[0].row_index)


def final_state(job: JobRow, progress: JobProgress) -> tuple[JobState, str | None]:
    """DONE, PARTIAL (some rows failed), FAILED (all did), or CANCELLED."""
    finished = progress.completions
    missing = progress.rows_failed + (progress.groups_total - progress.groups_done)
    is_cut_short = progress.groups_done < progress.groups_total or not progress.ingest_done
    if job.cancel_requested and (is_cut_short or not finished):
        return JobState.CANCELLED, None
    if not missing:
        return JobState.DONE, None
    if finished:
        return JobState.PARTIAL, None
    return JobState.FAILED, "no row could be completed; see the error column of the output"


def _info(job: JobRow, spec: JobSpec, head: Head) -> dict[str, Any]:
    """What the manifest says of the job: also how far its audit log went, which holds that down."""
    info: dict[str, Any] = {
        "name": job.name,
        "spec_sha256": job.spec_digest if job.privacy.is_full else spec.digest(),
        "verification": spec.speculation.verification.value,
        "audit_log": {"number": head.number, "hash": head.hash.hex()},
    }
    return info | ({"stopped": job.stop_reason} if job.stop_reason else {})


def _cancelled(job: JobRow, row: PromptRow, error: str = "") -> Iterator[CompletionRecord]:
    reason = job.stop_reason or error or FinishReason.CANCELLED.value
    return _records(job, row, FinishReason.CANCELLED, reason)


def _records(
    job: JobRow, row: PromptRow, reason: FinishReason, error: str
) -> Iterator[CompletionRecord]:
    for sample in range(row.n):
        yield _empty(job, row, sample, reason, error)


def _empty(
    job: JobRow, row: PromptRow, sample: int, reason: FinishReason, error: str
) -> CompletionRecord:
    return CompletionRecord(
        row_index=row.row_index,
        sample_index=sample,
        row_id=row.row_id,
        tag=row.tag,
        seed=sample_seed(row.seed, sample),
        prompt_tokens=len(row.prompt_ids),
        token_ids=(),
        text="",
        finish_reason=reason,
        origins=(),
        logprobs=(),
        proposed=0,
        accepted=0,
        verifier_passes=0,
        cost_usd=0.0,
        verifier=job.verifier,
        proposer=job.proposer,
        error=error,
    )
