"""Record: decode a group's tokens to text, and commit its rows in one transaction.

Now and then a part of the output is written, too, whose rows are all there (`staging.py`).
"""

from __future__ import annotations

import time

from specbatch.pipeline.stages import spans
from specbatch.pipeline.stages.attempt import attempt
from specbatch.pipeline.stages.context import StageContext
from specbatch.pipeline.stages.group_report import group_report, quarantine_report
from specbatch.pipeline.stages.moderation import policy_report
from specbatch.pipeline.stages.results import recorded_as
from specbatch.pipeline.stages.reuse import offer_answers, reuse_report
from specbatch.pipeline.stages.scoring import score_report
from specbatch.pipeline.stages.staging import stage_part
from specbatch.pipeline.storage.artefacts import read_results
from specbatch.pipeline.storage.prompts import rows_of
from specbatch.pipeline.storage.workspace import read_own
from specbatch.schemas.records import Stage, StageTiming


def record(context: StageContext, job_id: str, index: int) -> None:
    """Record this group; if the job waited for no other, enqueue the job's next stage."""
    store, objects = context.store, context.objects
    work = store.claim_group(job_id, index, Stage.RECORD, context.owner, context.lease_sec)
    if work is None:
        context.pass_on(Stage.RECORD, job_id)
        return
    begun, recorded = time.monotonic(), None
    with attempt(context, work.lease) as held:
        begun_ns = time.time_ns()  # inside the attempt's span
        assert work.results is not None, "a group reaches RECORD with its results"
        job, spec = context.jobs.of_group(job_id)
        spans.begun(held.span, Stage.RECORD, job, work)
        rows = rows_of(objects, job, work.where)
        mine = {row.row_index for row in rows}  # groups that were split off share the file
        results = read_results(read_own(objects, job, work.results))
        records = [record for record in results.records if record.row_index in mine]
        done, kept = recorded_as(context, job, spec, rows, records, results.rulings)
        report = group_report(records) | dict(results.measured(mine))
        report |= reuse_report(results.reuse, records)
        report |= policy_report(done) | score_report(done, rows, spec)
        report |= quarantine_report(done, spec)
        with held.usage.last_write():
            timing = StageTiming(time.monotonic() - begun)
            due = store.commit_group(work.lease, kept, timing, report, held.usage)
        spans.recorded(held.span, job, records, begun_ns)
        if due is not None:
            context.enqueue_unit(job, due, None)
        offer_answers(store, job, results.reuse, done)
        recorded = held, job, spec
    if recorded is not None:  # the group needs no lease any more
        stage_part(context, *recorded, index)
