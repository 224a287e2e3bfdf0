"""Makes a batch's files of its job's output, and says how the batch ended.

The lines are those that the job published. The model has its name in the allow list, not its
folder's; what was not done because the batch was stopped says so in OpenAI's words.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson

from specbatch.jobs.serve.errors import failure
from specbatch.jobs.serve.file_store import FILE, FileStore
from specbatch.pipeline.ledger.budget_rules import stopped_by_tenant
from specbatch.pipeline.ledger.rules import budget_was_spent, deadline_passed
from specbatch.pipeline.outputs.names import OPENAI
from specbatch.schemas.file_modes import new_file
from specbatch.schemas.records import FinishReason, JobRow, JobState
from specbatch.schemas.serving import (
    BatchEnd,
    BatchRow,
    BatchStatus,
    Purpose,
    StoredFile,
)


class Stop(StrEnum):
    """What stopped a batch: the code of the requests that were not done for it."""

    WINDOW = "batch_expired"
    CLIENT = "batch_cancelled"
    BUDGET = "budget_spent"
    TENANT = "token_limit_exceeded"
    OPERATOR = "stopped_by_operator"


_SAID = {
    Stop.WINDOW: "the completion window ended before this request",
    Stop.CLIENT: "the batch was cancelled before this request",
    Stop.BUDGET: "the budget of a batch of this model was spent before this request",
    Stop.TENANT: "the budget of your tenant was spent before this request",
    Stop.OPERATOR: "the operator stopped the batch before this request",
}
# In the batch's errors: its status does not say it.
_TOLD = (Stop.BUDGET, Stop.TENANT, Stop.OPERATOR)


def collect(file_store: FileStore, batch: BatchRow, job: JobRow) -> BatchEnd:
    """The end of a batch whose job has ended. Its files are in place; their rows are the caller's
    to add. Raises `OSError`."""
    stop = why_stopped(batch, job)
    output, errors = (file_store.output_of(batch.batch_id) / name for name in OPENAI)
    if not (output.exists() and errors.exists()):  # its publication may have failed in between
        return not_run(batch, job)
    done, made = _made(file_store, batch, job, stop, output, "output")
    failed, refused = _made(file_store, batch, job, stop, errors, "errors")
    return BatchEnd(
        _status(stop),
        completed=done.lines,
        failed=failed.lines - failed.stopped,
        output=made,
        errors_file=refused,
        errors=_told(stop, job),
        finalizing_at=job.finished_at,
    )


def not_run(batch: BatchRow, job: JobRow) -> BatchEnd:
    """The end of a batch whose job ended without an output. Why it failed is the operator's to see:
    it may name folders."""
    if (stop := why_stopped(batch, job)) is not None:
        return BatchEnd(_status(stop), errors=_told(stop, job))
    said = f"the batch could not be run: ask the operator about job {job.job_id}"
    return BatchEnd(BatchStatus.FAILED, errors=(failure("batch_failed", said),))


def why_stopped(batch: BatchRow, job: JobRow) -> Stop | None:
    """None: it was not."""
    if job.state is not JobState.CANCELLED:
        return None
    if batch.cancelling_at is not None:
        return Stop.CLIENT
    if deadline_passed(job.stop_reason):
        return Stop.WINDOW
    if stopped_by_tenant(job.stop_reason):
        return Stop.TENANT
    return Stop.BUDGET if budget_was_spent(job.stop_reason) else Stop.OPERATOR


def _status(stop: Stop | None) -> BatchStatus:
    if stop is None:
        return BatchStatus.COMPLETED  # also where every request failed: the error file says why
    return BatchStatus.EXPIRED if stop is Stop.WINDOW else BatchStatus.CANCELLED


def _told(stop: Stop | None, job: JobRow) -> tuple[dict[str, Any], ...]:
    if stop is None or stop not in _TOLD:
        return ()
    said = f"{_SAID[stop]}: {job.stop_reason}" if stop is Stop.TENANT else _SAID[stop]
    return (failure(stop, said),)


@dataclass(slots=True)
class _Counts:
    lines: int = 0
    stopped: int = 0  # of these, not done because the batch was stopped


def made_id(batch: BatchRow, job: JobRow, kind: str) -> str:
    """The id of a batch's file: whoever makes it again makes the same one."""
    ms = int((job.finished_at or batch.created_at) * 1000)
    return f"{FILE}{ms:011x}{hashlib.sha256(f'{batch.batch_id}/{kind}'.encode()).hexdigest()[:20]}"


def _made(
    file_store: FileStore,
    batch: BatchRow,
    job: JobRow,
    stop: Stop | None,
    source: Path,
    kind: str,
) -> tuple[_Counts, StoredFile | None]:
    """One of the two files, with its counts; None if it would be empty."""
    counts, digest, size = _Counts(), hashlib.sha256(), 0
    place = file_store.uploads / uuid4().hex
    try:
        with new_file(place, file_store.access) as file:
            for line in _lines(source, batch.model or "", stop, counts):
                digest.update(line)
                size += file.write(line)
            file.flush()
            os.fsync(file.fileno())
        if not size:
            return counts, None
        file_id = made_id(batch, job, kind)
        file_store.keep(place, file_id)
    finally:
        place.unlink(missing_ok=True)
    name = f"{batch.batch_id}_{kind}.jsonl"
    made = StoredFile(
        *(file_id, batch.tenant, Purpose.OUTPUT, name, size, digest.hexdigest()),
        file_store.service_id,
    )
    return counts, made


def _lines(source: Path, model: str, stop: Stop | None, counts: _Counts) -> Iterator[bytes]:
    with source.open("rb") as file:
        for line in file:
            value = orjson.loads(line)
            counts.lines += 1
            counts.stopped += _has_stopped(value)
            yield orjson.dumps(as_served(value, model, stop), option=orjson.OPT_APPEND_NEWLINE)


def _has_stopped(line: dict[str, Any]) -> bool:
    return (line.get("error") or {}).get("code") == FinishReason.CANCELLED


def as_served(line: dict[str, Any], model: str, stop: Stop | None) -> dict[str, Any]:
    """A line of a published file as clients get it."""
    response = line.get("response")
    if response is not None:
        response = {**response, "body": {**response["body"], "model": model}}
        return {**line, "response": response}
    if _has_stopped(line) and stop is not None:
        return {**line, "error": {"code": stop.value, "message": _SAID[stop]}}
    return line
