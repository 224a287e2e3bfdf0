"""Ingest: read a job's input into groups, no faster than they are done.

    claim     the job, with the store's cursor into its input
    begin     check and pin its models, claim its output, write its history, open the input
    read      check rows, write groups of prompts, store them, enqueue each at once
    pause     if too many groups are open, give the lease back

Nobody sleeps or waits while a reading pauses: the store says when reading is due again, and the
job is enqueued. A reading that pauses stays in memory (`readings.py`); another worker resumes from
the store's cursor, and reads the ids before it once more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

from specbatch.pipeline.engines.models.identity import check_models, identity_of, models_of
from specbatch.pipeline.engines.models.model_folder import vocabulary_digest
from specbatch.pipeline.inputs.planner import (
    MOST_TOGETHER,
    WRITERS,
    PlannedGroup,
    in_batches,
    plan,
    write_groups,
)
from specbatch.pipeline.inputs.token_bounds import most_tokens
from specbatch.pipeline.outputs.outputs import OutputWriter
from specbatch.pipeline.runtime.leases import Held
from specbatch.pipeline.runtime.tokenizers import with_its_model
from specbatch.pipeline.stages import spans
from specbatch.pipeline.stages.attempt import attempt, begin
from specbatch.pipeline.stages.context import StageContext
from specbatch.pipeline.stages.inputs import open_checked
from specbatch.pipeline.stages.readings import Reading
from specbatch.pipeline.stages.whole_results import put_rejected
from specbatch.schemas.context_length import CONTEXT_TOKENS
from specbatch.schemas.records import JobRow, JobWork, Stage
from specbatch.schemas.spec import JobSpec


def ingest(context: StageContext, job_id: str) -> None:
    """Read and check the input until it ends, enough groups are open, or the job is stopped."""
    work = context.store.claim_job(job_id, Stage.INGEST, context.owner, context.lease_sec)
    if work is None:
        context.pass_on(Stage.INGEST, job_id)
        return
    with attempt(context, work.lease) as held:
        job, spec = context.jobs.fresh(job_id)
        begin(context, held, job)
        _read(context, work, held, job, spec)
    context.enqueue_publish(job_id)


def _read(context: StageContext, work: JobWork, held: Held, job: JobRow, spec: JobSpec) -> None:
    """Read on. The lease is given back where enough groups are open; if the job is stopped too,
    that happens after the last stored group, so that the remainder can be written.

    Raises `UsageError`, `FencedError`, `ModelChangedError` if the job began with other models, and
    `ObjectError` if storage is out of reach.
    """
    store, lease = context.store, work.lease
    reading = context.paused.take(job.job_id, (work.cursor, work.next_row, work.next_group))
    if reading is None:
        with with_its_model(job):
            reading = _begin(context, work, job, spec)
        # At once: a job may be stopped while its reading pauses, and is published all the same.
        store.note_report(lease, reading.identity)
    rows, room = work.next_row, 1
    with ThreadPoolExecutor(WRITERS, "prompts") as writers:
        for batch in reading.batches:
            held.check()
            if held.cancelled.is_set():
                store.release(lease, "its job was stopped", forgiven=True)
                return
            begun_ns = time.time_ns()
            _store_groups(context, held, job, spec, batch, rows, writers)
            spans.read(held.span, job, batch, begun_ns)
            last = batch[-1]
            rows, room = last.next_row, room - sum(bool(planned.rows) for planned in batch)
            if room <= 0 and not (room := _room(context, held)):
                place = (last.cursor, rows, last.index + bool(last.rows))
                context.paused.put(job.job_id, place, reading)
                return
    with held.usage.last_write():
        store.finish_ingest(lease, rows, reading.identity, rows, held.usage)


def _room(context: StageContext, held: Held) -> int:
    """How many groups may be added; 0: the reading has paused, and the attempt is over."""
    with held.usage.last_write():
        room = context.store.pause_ingest(held.lease, context.max_open_groups, held.usage)
        held.usage.is_over = not room
    return room


def _begin(context: StageContext, work: JobWork, job: JobRow, spec: JobSpec) -> Reading:
    context.privacy.check(job)
    verifier, proposer = check_models(context.models, spec)
    context.store.pin_models(work.lease, models_of(spec, verifier, proposer))
    OutputWriter(context.objects, spec.output.uri, job.job_id).claim()
    source, pinned = open_checked(context, work, job, spec)
    if spec.sampling.max_tokens >= verifier.context_tokens:
        context.store.note_report(work.lease, {CONTEXT_TOKENS: verifier.context_tokens})
    context.drafting.prepare(work.lease, job, spec, vocabulary_digest(verifier))
    start = (work.cursor, work.next_row, work.next_group)
    planned = plan(source, context.checker(job, spec, verifier), spec.group_size, *start)
    identity = identity_of(job, spec, source.format, verifier, proposer) | pinned
    batches = in_batches(planned, min(MOST_TOGETHER, context.max_open_groups))
    return Reading(source, batches, identity)


def _store_groups(
    context: StageContext,
    held: Held,
    job: JobRow,
    spec: JobSpec,
    batch: Sequence[PlannedGroup],
    from_row: int,
    writers: Executor,
) -> None:
    """Write the groups' prompts, commit them in one transaction, and enqueue each."""

    def first_stage(index: int) -> Stage:
        return Stage.PROPOSE if context.drafting.proposes(job, spec, index) else Stage.VERIFY

    bounded = partial(most_tokens, spec)
    groups = write_groups(context.objects, job, batch, first_stage, writers, bounded)
    text_policy = context.privacy.text_policy(job)
    if not text_policy.is_full:
        for planned in batch:
            put_rejected(context.objects, job, planned.rejected)
    rejected = [text_policy.rejected(row) for planned in batch for row in planned.rejected]
    last = batch[-1]
    context.store.add_groups(
        held.lease, groups, rejected, last.next_row, last.cursor, from_row, held.usage
    )
    for group in groups:
        context.enqueue_unit(job, group.first_stage, group.index)
