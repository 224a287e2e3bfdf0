"""Publish: write the output files, the manifest last, and end the job.

Parts that were written while groups ran (`staging.py`) only move to their places. Every input row
is in the output, an unfinished one with its reason. Beside the output of a job that was stopped
lies its remainder: the rows that are left to do, as a job of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from specbatch.pipeline.inputs.planner import PlannedGroup, plan
from specbatch.pipeline.outputs.best import best_of_each
from specbatch.pipeline.outputs.names import MANIFEST
from specbatch.pipeline.outputs.outputs import OutputWriter
from specbatch.pipeline.outputs.parts import columns_of_job
from specbatch.pipeline.runtime.leases import Held
from specbatch.pipeline.runtime.purge import clear
from specbatch.pipeline.runtime.tokenizers import with_its_model
from specbatch.pipeline.stages import spans
from specbatch.pipeline.stages.attempt import attempt
from specbatch.pipeline.stages.context import StageContext
from specbatch.pipeline.stages.inputs import open_again
from specbatch.pipeline.stages.kept_columns import kept_columns
from specbatch.pipeline.stages.lineage import output_facts
from specbatch.pipeline.stages.remainder import Remainder, write_remainder
from specbatch.pipeline.stages.reviews import revision_of, with_decisions
from specbatch.pipeline.stages.tables import input_table, table_commit
from specbatch.pipeline.stages.unfinished import cancelled, unfinished_rows, with_unfinished_rows
from specbatch.pipeline.stages.whole_results import held_back, recorded, rejected_whole
from specbatch.pipeline.storage.objects import join
from specbatch.schemas.audit import Head, PublishedManifest
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.mapper import without_details
from specbatch.schemas.openai_formats import openai_format
from specbatch.schemas.policies import HeldBack, Place
from specbatch.schemas.records import (
    CompletionRecord,
    JobRow,
    JobState,
    JobWork,
    Stage,
)
from specbatch.schemas.spec import JobSpec


def publish(context: StageContext, job_id: str) -> None:
    """Publish the job. Afterwards files that nobody needs any more are deleted."""
    work = context.store.claim_job(job_id, Stage.PUBLISH, context.owner, context.lease_sec)
    if work is None:
        context.pass_on(Stage.PUBLISH, job_id)
        return
    published = False
    with attempt(context, work.lease) as held:
        job, spec = context.jobs.fresh(job_id)
        spans.begun(held.span, Stage.PUBLISH, job)
        with with_its_model(job):  # the remainder of a stopped job is checked with it
            state, error, manifest = _write(context, held, work, job, spec)
        reason = error and context.privacy.words(job, error)
        with held.usage.last_write():
            context.store.finish_job(work.lease, state, reason, manifest, held.usage)
        published = True
        context.outage.published(job_id)
        context.drafting.forget(job)
        if not job.privacy.is_full:
            clear(context.store, context.objects, job.job_id)
    if published and context.anchoring is not None:
        context.anchoring.published(job_id)


def _write(
    context: StageContext, held: Held, work: JobWork, job: JobRow, spec: JobSpec
) -> tuple[JobState, str | None, PublishedManifest]:
    """Write the output; returns the job's final state, an error, and the manifest.

    Raises `OutputError`, `ObjectError`, and `FencedError` once another worker publishes the job.
    """
    store, objects = context.store, context.objects
    progress = store.progress(job.job_id)
    done = None
    output = spec.output
    columns = columns_of_job(scored=output.best_by is not None)
    writer = OutputWriter(objects, output.uri, job.job_id, kind=output.format, columns=columns)
    staged = writer.usable(store.staged_parts(job.job_id))
    first_row = staged[-1].then.row_index if staged else 0
    if job.privacy.is_full:
        rejected = store.rejected(job.job_id, first_row=first_row)
    else:  # the output is the submitter's and whole, whatever the store keeps
        done = recorded(store, objects, job, spec, context.decode(job))
        rejected = rejected_whole(store, objects, job)
    keep = output.keep_best
    rows = with_unfinished_rows(store, objects, job, done, keep is not None, first_row)
    reviews = store.reviews(job.job_id)
    rows = with_decisions(rows, reviews, partial(_held_back, context, job, spec))
    with objects.temp_folder() as folder:
        unread_input = _Unread(context, work, job, spec)
        left = None
        if job.cancel_requested:
            unread = () if progress.ingest_done else unread_input
            left = _write_remainder(context, folder, work, job, spec, unread)
            never_read = left.unread_rows(spec.sampling.n)
            rows = chain(rows, (r for row in never_read for r in cancelled(job, row)))
            rejected = chain(rejected, left.newly_quarantined())
        input_format = job.report.get("input_format") or unread_input.format
        rows = best_of_each(rows, keep)
        kept = kept_columns(context, job, spec)
        manifest = writer.write(
            rows,
            rejected,
            openai=openai_format(input_format or spec.input.format),
            created=int(job.created_at),
            decode=context.decode(job),
            info=_info(job, spec, store.log_head(job.job_id)) | revision_of(reviews),
            commit=table_commit(context, held, spec),
            beside=left.files if left is not None else (),
            still_mine=partial(context.lease_keeper.confirm, held),
            kept=kept,
            quarantines=output.malformed.then == "quarantine",
            staged=staged,
        )
    if context.tells_lineage:
        facts = output_facts(manifest, columns.schema, None if kept is None else kept.schema)
        store.note_report(work.lease, facts.noted())
    state, error = final_state(job, progress)
    error = error or (left.problem if left is not None else None)
    uri, sha256 = join(spec.output.uri, MANIFEST), hashlib.sha256(manifest.to_json())
    return state, error, PublishedManifest(uri, sha256.hexdigest())


def _held_back(
    context: StageContext, job: JobRow, spec: JobSpec, places: Mapping[Place, HeldBack]
) -> dict[Place, CompletionRecord]:
    found = held_back(context.store, context.objects, job, spec, context.decode(job), places)
    if spec.output.keep_best:
        return found
    return {place: without_details(record) for place, record in found.items()}


def _write_remainder(
    context: StageContext,
    folder: Path,
    work: JobWork,
    job: JobRow,
    spec: JobSpec,
    unread: Iterable[PlannedGroup],
) -> Remainder:
    found = unfinished_rows(context.store, context.objects, job)
    unfinished = (row for row, word, _ in found if word == Stage.CANCELLED)
    tries_again = work.lease.attempt < context.max_attempts
    return write_remainder(folder, job, spec, unfinished, unread, tries_again)


@dataclass(slots=True)
class _Unread:
    """The input from where its reading ended. Iterating raises `UsageError` and `ObjectError`.

    `format` is set once the input was opened: if the job was stopped before, no report has it.
    """

    context: StageContext
    work: JobWork
    job: JobRow
    spec: JobSpec
    format: str | None = None

    def __iter__(self) -> Iterator[PlannedGroup]:
        context, spec = self.context, self.spec
        source = open_again(context, self.work, self.job, spec)
        self.format = source.format
        checker = context.checker(self.job, spec, context.models(spec.verifier))
        yield from plan(source, checker, spec.group_size, self.work.cursor, self.work.next_row)


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
    return JobState.FAILED, "no row could be completed; `specbatch show` says why"


def _info(job: JobRow, spec: JobSpec, head: Head) -> dict[str, Any]:
    """What the manifest says of the job, also how far its audit log went, which pins the log."""
    info: dict[str, Any] = {
        "name": job.name,
        "spec_sha256": job.spec_digest if job.privacy.is_full else spec.digest(),
        "verification": spec.speculation.verification.value,
        "audit_log": {"number": head.number, "hash": head.hash.hex()},
        **input_table(job, spec),
    }
    if (best_by := spec.output.best_by) is not None:
        info |= {"keep_best": spec.output.keep_best, "best_by": best_by.shown(job.privacy.is_full)}
    return info | ({"stopped": job.stop_reason} if job.stop_reason else {})
