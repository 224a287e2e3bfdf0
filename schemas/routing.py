"""Which queue a bell rings on. Submitters and workers compute it alike, from names alone."""

from __future__ import annotations

import hashlib

from specbatch.schemas.records import Stage

QUEUE_KINDS = {
    Stage.INGEST: "ingest",
    Stage.PROPOSE: "propose",
    Stage.VERIFY: "verify",
    Stage.RECORD: "record",
    Stage.PUBLISH: "record",  # the same workers, the same needs: a tokenizer and the output
}


def queue_for(stage: Stage, model: str | None) -> str:
    """`verify.<key of the model>` for engines, which serve one model; the kind alone otherwise."""
    kind = QUEUE_KINDS[stage]
    if stage not in (Stage.PROPOSE, Stage.VERIFY):
        return kind
    return f"{kind}.{hashlib.sha256((model or '').encode()).hexdigest()[:12]}"
