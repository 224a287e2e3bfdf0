"""A job with an entry of every kind in its log, and what an audit of it finds."""

from __future__ import annotations

import orjson
from contracts.shorthand import MANIFEST, MANIFEST_BYTES, claim, claim_job, exhaust, verified
from ledger.builders import JOB, NO_TIME, completion, new_group, new_job, position

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.operations.audit import ChainAudit, audit_chain
from specbatch.pipeline.storage.object_store import ObjectInfo
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.provenance import Provenance, Ticks
from specbatch.schemas.records import (
    Artefact,
    CompletionRecord,
    FinishReason,
    JobState,
    RejectedRow,
    Stage,
)

OTHER = "job00000000000002"
ROWS = 4  # of a group


def record(row: int, sample: int = 0) -> CompletionRecord:
    """A completion with something in every field that the store keeps."""
    return completion(
        row,
        sample,
        error="e",
        logprobs=(-0.5, float("nan"), -2.0),
        provenance=Provenance((4, 5), (70, 80), ("ngram",), (0,), (1,), (9,)),
        ticks=Ticks(1, 2, 3, 4, 5, 6),
        price_microusd=7,
        ahead_ticks=8,
        ahead_price_microusd=9,
        receipt=bytes(range(52)),
    )


def tell_everything(store: Store) -> None:
    """A job that loses a group, is stopped half-way, goes on, and is published twice."""
    store.create_job(new_job(idempotency_key="night-1", deadline_sec=9e9, budget_usd=5.0))
    store.create_job(new_job(OTHER))
    lease = claim_job(store, Stage.INGEST).lease
    rejected = [RejectedRow(12, "r12", "null_prompt", "nothing"), RejectedRow(13, None, "x", "y")]
    planned = [new_group(index, ROWS) for index in range(3)]
    store.add_groups(lease, planned, rejected, 14, position(14))
    store.finish_ingest(lease, 14, {"verifier_sha256": "f" * 64, "input_format": "jsonl"})
    commit(store, 0)
    exhaust(store, 1)
    held = claim(store, 2)
    store.request_cancel(JOB, "cancelled by eve")
    store.keep_part(held.lease, [record(8), record(9)], NO_TIME, {})
    end(store, JobState.CANCELLED)
    assert store.retry_job(JOB) == 2
    commit(store, 1)
    lease = verified(store, 2)
    store.commit_group(lease, [record(10), record(11)], NO_TIME, {})
    end(store, JobState.PARTIAL)
    store.note_action(JOB, EntryKind.EXPORTED, {"what": "tokens", "to": "file:///x"})
    store.note_action(JOB, EntryKind.PURGED, {"rows": [], "why": "nothing was old enough"})


def commit(store: Store, index: int) -> None:
    rows = range(index * ROWS, index * ROWS + ROWS)
    store.commit_group(verified(store, index), [record(row) for row in rows], NO_TIME, {"a": 1.0})


def end(store: Store, state: JobState) -> None:
    lease = claim_job(store, Stage.PUBLISH).lease
    error = "three rows" if state is JobState.PARTIAL else None
    store.finish_job(lease, state, error, MANIFEST)


class Published(Objects):
    """The output of the job, in which only a manifest and the marker lie."""

    files = {  # noqa: RUF012 - nobody changes it
        "/out/manifest.json": MANIFEST_BYTES,
        "/out/_specbatch_job.json": orjson.dumps({"job_id": JOB}),
    }

    def head(self, uri: str) -> ObjectInfo | None:
        data = self.files.get(uri)
        return None if data is None else ObjectInfo(uri, len(data), "1")

    def get_bytes(self, uri: str, expect: Artefact | None = None) -> bytes:
        return self.files[uri] if expect is None else super().get_bytes(uri, expect)

    def list(self, prefix: str) -> list[ObjectInfo]:
        return [
            ObjectInfo(uri, len(data), "1")
            for uri, data in self.files.items()
            if uri.startswith(prefix)
        ]


def audited(store: Store, job_id: str = JOB) -> ChainAudit:
    return audit_chain(store, Published(), job_id)


def told(store: Store, job_id: str = JOB) -> list[str]:
    """What an audit finds, in words."""
    return [finding.what for finding in audited(store, job_id).findings]


def other_reason(reason: str) -> str:
    return str(FinishReason.LENGTH if reason == FinishReason.STOP else FinishReason.STOP)
