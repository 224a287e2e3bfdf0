"""What clients ask of batches, and how a batch looks to them."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import orjson

from specbatch.jobs.serve.errors import ApiError, wrong
from specbatch.jobs.serve.file_store import BATCH, FILE, checked
from specbatch.pipeline.privacy.tenants import Privacy
from specbatch.schemas.days import DAY_SEC
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.openai_formats import FORMATS
from specbatch.schemas.records import JobRow, Stage
from specbatch.schemas.serving import (
    BatchPhase,
    BatchRow,
    BatchStatus,
    NewBatch,
    StoredFile,
    new_id,
)

MOST_PAIRS, MOST_NAME_CHARS, MOST_VALUE_CHARS = 16, 64, 512  # of metadata, as OpenAI has it
MOST_KEY_CHARS = 255
_WINDOW = re.compile(r"([1-9][0-9]{0,3})([hd])")
_UNIT_SEC = {"h": 3600.0, "d": DAY_SEC}
_FIELDS = {"input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"}
_ENDED_AT = {
    BatchStatus.COMPLETED: "completed_at",
    BatchStatus.FAILED: "failed_at",
    BatchStatus.EXPIRED: "expired_at",
    BatchStatus.CANCELLED: "cancelled_at",
}
_STOPPING = (BatchStatus.CANCELLED, BatchStatus.CANCELLING)


def new_batch(
    body: bytes, tenant: str, key: str | None, service_id: str, privacy: Privacy
) -> NewBatch:
    """What a POST to /v1/batches asks for, as its tenant's privacy keeps it. Raises `ApiError`."""
    asked = _object(body)
    for name in asked:
        if name not in _FIELDS:
            raise wrong(name[:50], f"`{name[:50]}` is not supported: leave it out")
    if asked.get("output_expires_after") is not None:
        said = "`output_expires_after` is not supported: delete files when you are done"
        raise wrong("output_expires_after", said)
    endpoint = asked.get("endpoint")
    if not isinstance(endpoint, str) or endpoint not in FORMATS:
        raise wrong("endpoint", f"endpoint must be one of {', '.join(FORMATS)}")
    window = asked.get("completion_window")
    window_sec = seconds_of(window) if isinstance(window, str) else None
    if window_sec is None:
        said = "completion_window must be hours or days, as in 24h or 7d"
        raise wrong("completion_window", said)
    file_id = asked.get("input_file_id")
    if not isinstance(file_id, str):
        raise wrong("input_file_id", "input_file_id must be the id of a file")
    if key is not None and not 0 < len(key) <= MOST_KEY_CHARS:
        raise ApiError(400, f"an Idempotency-Key has at most {MOST_KEY_CHARS} characters")
    metadata = _metadata(asked.get("metadata"))
    if metadata is not None and not privacy.mode_of(tenant).is_full:
        metadata = {
            privacy.label(tenant, name): privacy.label(tenant, value)
            for name, value in metadata.items()
        }
    order = [endpoint, window, file_id, metadata]
    return NewBatch(
        batch_id=new_id(BATCH),
        tenant=tenant,
        endpoint=str(endpoint),
        input_file_id=checked(FILE, file_id),
        completion_window=str(window),
        window_sec=window_sec,
        digest=hashlib.sha256(orjson.dumps(order, option=orjson.OPT_SORT_KEYS)).hexdigest(),
        service_id=service_id,
        idempotency_key=privacy.idempotency_key(tenant, key),
        metadata=metadata,
    )


def seconds_of(window: str) -> float | None:
    """Of a completion window; None: it is none."""
    found = _WINDOW.fullmatch(window)
    return None if found is None else int(found[1]) * _UNIT_SEC[found[2]]


def _object(body: bytes) -> dict[str, Any]:
    try:
        asked = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise ApiError(400, "the body is not JSON, or is nested too deeply") from None
    if not isinstance(asked, dict):
        raise ApiError(400, "the body must be a JSON object")
    return asked


def _metadata(given: Any) -> dict[str, str] | None:
    if given is None:
        return None
    is_good = (
        isinstance(given, dict)
        and len(given) <= MOST_PAIRS
        and all(len(name) <= MOST_NAME_CHARS for name in given)
        and all(isinstance(v, str) and len(v) <= MOST_VALUE_CHARS for v in given.values())
    )
    if not is_good:
        raise wrong(
            "metadata",
            f"metadata has at most {MOST_PAIRS} pairs of text, names of {MOST_NAME_CHARS} and "
            f"values of {MOST_VALUE_CHARS} characters",
        )
    return dict(given)


def status_of(batch: BatchRow, job: JobRow | None) -> BatchStatus:
    """The status of a batch, which follows from its job until it has ended."""
    if batch.status is not None:
        return batch.status
    if batch.phase is BatchPhase.NEW:
        return BatchStatus.VALIDATING
    if batch.cancelling_at is not None:
        return BatchStatus.CANCELLING
    if job is None:
        return BatchStatus.IN_PROGRESS
    if job.cancel_requested or job.stage in (Stage.PUBLISH, Stage.END):
        return BatchStatus.FINALIZING
    return BatchStatus.IN_PROGRESS


@dataclass(frozen=True, slots=True)
class BatchView:
    """A batch with what its job says; None: it has none, or it is not asked."""

    batch: BatchRow
    job: JobRow | None = None
    progress: JobProgress | None = None

    def as_json(self) -> dict[str, Any]:
        """OpenAI's batch object, and ours in `specbatch`."""
        batch, status = self.batch, status_of(self.batch, self.job)
        ended = dict.fromkeys(_ENDED_AT.values())
        if batch.status is not None:
            ended[_ENDED_AT[batch.status]] = _seconds(batch.ended_at)
        errors = {"object": "list", "data": list(batch.errors)} if batch.errors else None
        return {
            "id": batch.batch_id,
            "object": "batch",
            "endpoint": batch.endpoint,
            "model": batch.model,
            "errors": errors,
            "input_file_id": batch.input_file_id,
            "completion_window": batch.completion_window,
            "status": status.value,
            "output_file_id": batch.output_file_id,
            "error_file_id": batch.error_file_id,
            "created_at": _seconds(batch.created_at),
            "in_progress_at": _seconds(batch.in_progress_at),
            "expires_at": _seconds(batch.expires_at),
            "finalizing_at": _seconds(batch.finalizing_at),
            "cancelling_at": _seconds(batch.cancelling_at) if status in _STOPPING else None,
            **ended,
            "request_counts": self._counts(),
            "metadata": batch.metadata,
            "usage": self._usage(),
            "specbatch": self._beyond_openai(),
        }

    def _counts(self) -> dict[str, int]:
        batch, progress = self.batch, self.progress
        completed, failed = batch.completed, batch.failed
        if progress is not None and batch.status is None:
            failed = progress.rows_failed
            completed = progress.rows_done - failed
        return {"total": batch.requests, "completed": completed, "failed": failed}

    def _usage(self) -> dict[str, Any] | None:
        progress = self.progress
        if progress is None or self.batch.status is None:
            return None
        return {
            "input_tokens": progress.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": progress.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": progress.prompt_tokens + progress.completion_tokens,
        }

    def _beyond_openai(self) -> dict[str, Any] | None:
        """How far it is, what drafting is worth, and what it has cost so far."""
        progress, job = self.progress, self.job
        if progress is None or job is None:
            return None
        return {
            "job_id": progress.job_id,
            "job_state": progress.state.value,
            "waits_because": self.batch.waits_because,
            "rows_done": progress.rows_done,
            "prompt_tokens": progress.prompt_tokens,
            "completion_tokens": progress.completion_tokens,
            "drafted_tokens": progress.proposed,
            "accepted_tokens": progress.accepted,
            "acceptance_rate": progress.acceptance_rate,
            "tokens_per_pass": progress.tokens_per_pass(job.report),
            "compute_sec": progress.compute_sec,
            "queue_sec": progress.queue_sec,
            "cost_usd": progress.cost_usd,
        }


def file_json(file: StoredFile) -> dict[str, Any]:
    """OpenAI's file object, and the SHA-256 of the content."""
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": _seconds(file.created_at),
        "filename": file.filename,
        "purpose": file.purpose.value,
        "status": "processed",
        "expires_at": None,
        "sha256": file.sha256,
    }


def list_json(items: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """A page of a list, as OpenAI has it."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }


def _seconds(at: float | None) -> int | None:
    return None if at is None else int(at)
