"""Work messages to stages: ingest → propose → verify → record → publish.

INGEST, RECORD and PUBLISH claim the unit that the message names. PROPOSE and VERIFY claim the next
group in fair-share order, and the named one only if there is none. If nothing can be claimed, the
stage does nothing: a message may come twice, late or never.
"""

from __future__ import annotations

import logging

from specbatch.pipeline.observe.tracing.context import CurrentWork, work_on
from specbatch.pipeline.stages.context import StageContext
from specbatch.pipeline.stages.ingest import ingest
from specbatch.pipeline.stages.propose import propose
from specbatch.pipeline.stages.publish import publish
from specbatch.pipeline.stages.record import record
from specbatch.pipeline.stages.verify import verify
from specbatch.schemas.errors import ObjectError, StoreError
from specbatch.schemas.records import Stage

log = logging.getLogger(__name__)


def run_stage(context: StageContext, stage: Stage, job_id: str, group_index: int | None) -> None:
    """Do what a message asks for, if it is still to be done and its results can be written."""
    outage = context.outage
    if not outage.wait() or (group_index is None and outage.holds_back(job_id)):
        return  # the sweeper enqueues it again
    try:
        _run(context, stage, job_id, group_index)
    except (StoreError, ObjectError) as error:
        if not error.refused:
            raise
        outage.begin(error)
    else:
        outage.over()


def _run(context: StageContext, stage: Stage, job_id: str, group_index: int | None) -> None:
    work_on(CurrentWork(job_id, str(stage), group_index))  # the claim may bring another unit
    match stage:
        case Stage.INGEST:
            ingest(context, job_id)
        case Stage.PROPOSE if group_index is not None:
            propose(context, job_id, group_index)
        case Stage.VERIFY if group_index is not None:
            verify(context, job_id, group_index)
        case Stage.RECORD if group_index is not None:
            record(context, job_id, group_index)
        case Stage.PUBLISH:
            publish(context, job_id)
        case _:
            log.warning("nothing to do at stage %s of job %s", stage, job_id)
