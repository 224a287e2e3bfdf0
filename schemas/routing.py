"""The queue of a unit of work. Submitters and workers compute it alike, from names alone.

    queue               work messages for
    ingest              inputs to read
    propose.<key>       groups to draft for, by the model: the first 12 digits of its name's SHA-256
    verify.<key>        groups to verify, likewise
    record              groups to record, and jobs to publish

These are the queues of jobs of normal priority; others append `.high` or `.low` to the name. A
message is only a notification: its worker claims the next group in fair-share order.
"""

from __future__ import annotations

import hashlib

from specbatch.schemas.records import NORMAL, PRIORITIES, Stage

# The kind of a unit's queue and of its workers, as `specbatch worker` names them.
KIND_OF_STAGE = {
    Stage.INGEST: "ingest",
    Stage.PROPOSE: "propose",
    Stage.VERIFY: "verify",
    Stage.RECORD: "record",
    Stage.PUBLISH: "record",  # the same workers, the same needs: a tokenizer and the output
}


def queue_for(stage: Stage, model: str | None, priority: int = NORMAL) -> str:
    """`verify.<key of the model>` for engines, which serve one model; the kind alone otherwise."""
    name = KIND_OF_STAGE[stage]
    if stage in (Stage.PROPOSE, Stage.VERIFY):
        name = f"{name}.{hashlib.sha256((model or '').encode()).hexdigest()[:12]}"
    return name if priority == NORMAL else f"{name}.{PRIORITIES[priority]}"
