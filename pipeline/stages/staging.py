"""Writes parts of a job's output while its groups run, so that its publication has less to do.

    see       whether a part's worth of rows lies before the first group that is not recorded
    claim     the next part, in the store
    write     it to the staging folder beside the output, where no reader looks
    note      it in the store, with size and SHA-256

A worker that has recorded a group does it now and then, and one part at most. Nothing waits for it:
what is not noted when the last group is recorded, PUBLISH writes. The files are those that it would
write itself. What fails here is logged, and fails neither group nor job.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from specbatch.pipeline.outputs.outputs import OutputWriter
from specbatch.pipeline.outputs.parts import columns_of_job
from specbatch.pipeline.runtime.leases import Held
from specbatch.pipeline.stages.context import StageContext
from specbatch.pipeline.storage.prompts import rows_of
from specbatch.schemas.errors import FencedError, SpecbatchError
from specbatch.schemas.openai_formats import openai_format
from specbatch.schemas.records import JobRow
from specbatch.schemas.spec import JobSpec
from specbatch.schemas.staging import PartClaim

log = logging.getLogger(__name__)

T = TypeVar("T")

_LOOKS_PER_PART = 4  # how often, at least, a worker looks whether a part may be written


def stage_part(
    context: StageContext, held: Held, job: JobRow, spec: JobSpec, group_index: int
) -> None:
    """Write the next part of the output if it is time to look, and its rows are there. What that
    uses counts for the attempt that recorded the group."""
    if not _may_be_staged(job, spec):
        return
    columns = columns_of_job(scored=spec.output.best_by is not None)
    writer = OutputWriter(
        context.objects, spec.output.uri, job.job_id, kind=spec.output.format, columns=columns
    )
    groups_per_part = writer.rows_per_part // (spec.group_size * spec.sampling.n)
    if (group_index + 1) % max(1, groups_per_part // _LOOKS_PER_PART):
        return
    try:
        _stage_next(context, held, context.store.get_job(job.job_id), writer)
    except SpecbatchError as error:
        reason = context.privacy.error(job, error)
        log.info("no part of job %s is staged now: %s", job.job_id, reason)


def _may_be_staged(job: JobRow, spec: JobSpec) -> bool:
    """Whether parts are final once their rows are recorded, and nothing but parts needs them.

    Of private jobs nothing is staged: no text may lie in an output that is not one yet. Rows that
    policies judge may wait for a review. Other files than parts hold all rows of a job.
    """
    output = spec.output
    needs_all_rows = (
        output.table is not None
        or output.keep_best is not None
        or bool(output.keep_columns)  # they are read from the input's first row on
        or output.malformed.then == "quarantine"
    )
    return job.privacy.is_full and not spec.policies and not needs_all_rows


def _stage_next(context: StageContext, held: Held, job: JobRow, writer: OutputWriter) -> None:
    """Raises `ObjectError`, `OutputError` and `FencedError`."""
    store, job_id = context.store, job.job_id
    input_format = job.report.get("input_format")
    if input_format is None or openai_format(input_format):  # its own files hold all rows
        return
    place = store.next_part(job_id)
    if place is None:
        return
    before = _watermark(context, job)
    needed = place.skip + writer.rows_per_part
    if store.rows_between(job_id, place.row_index, before, needed) < needed:
        return
    claim = store.claim_part(job_id, place, context.lease_sec)
    if claim is not None:
        with held.usage.measuring():
            _write(context, held, writer, claim, before)


def _watermark(context: StageContext, job: JobRow) -> int:
    """All rows before this one are recorded or quarantined."""
    prompts, next_row = context.store.first_unrecorded(job.job_id)
    if prompts is None:
        return next_row
    return rows_of(context.objects, job, prompts)[0].row_index


def _write(
    context: StageContext, held: Held, writer: OutputWriter, claim: PartClaim, before: int
) -> None:
    store, place = context.store, claim.place

    def still_mine() -> None:
        store.extend_part(claim, context.lease_sec)

    completions = store.completions(
        claim.job_id, details=False, first_row=place.row_index, before_row=before
    )
    rejected = store.rejected(claim.job_id, first_row=place.row_index, before_row=before)
    kept_alive = _every(context.lease_sec / 3, still_mine, completions)
    part = writer.stage(claim, kept_alive, rejected, still_mine)
    if part is None:
        return
    try:
        store.note_part(claim, part, held.lease, held.usage)
    except FencedError:
        writer.forget(claim)
        raise
    log.debug("part %d of job %s is staged", place.number, claim.job_id)


def _every(seconds: float, do: Callable[[], None], items: Iterable[T]) -> Iterator[T]:
    """Pass items through, and call `do` after so long each time."""
    begun = time.monotonic()
    for item in items:
        if time.monotonic() - begun >= seconds:
            do()
            begun = time.monotonic()
        yield item
