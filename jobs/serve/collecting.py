"""Makes a batch's files of its job's output, and says how the batch ended.

The lines are those that the job published. The model has its name in the allow list, not its
folder's; what was not done because the batch was stopped says so in OpenAI's words.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson

from specbatch.jobs.serve.shelf import FILE, Shelf
from specbatch.pipeline.ledger.rules import deadline_passed
from specbatch.pipeline.outputs.names import OPENAI
from specbatch.schemas.file_modes import new_file
from specbatch.schemas.records import FinishReason, JobRow, JobState
from specbatch.schemas.serving import (
    BatchEnd,
    BatchRow,
    BatchStatus,
    Purpose,
    StoredFile,
    new_id,
)

_STOPPED = {
    BatchStatus.EXPIRED: ("batch_expired", "the completion window ended before this request"),
    BatchStatus.CANCELLED: ("batch_cancelled", "the batch was cancelled before this request"),
}


def collect(shelf: Shelf, batch: BatchRow, job: JobRow) -> BatchEnd:
    """The end of a batch whose job has ended. Its files are in place; their rows are the caller's
    to add. Raises `OSError`."""
    status = _status(batch, job)
    output, errors = (shelf.output_of(batch.batch_id) / name for name in OPENAI)
    if not output.exists():
        return not_run(job.job_id)
    done, made = _made(shelf, batch, status, output, "output")
    failed, refused = _made(shelf, batch, status, errors, "errors")
    return BatchEnd(
        status,
        completed=done.lines,
        failed=failed.lines - failed.stopped,
        output=made,
        errors_file=refused,
        finalizing_at=job.finished_at,
    )


def not_run(job_id: str) -> BatchEnd:
    """The end of a batch whose job has no output. The reason is the operator's to see: it may name
    folders."""
    said = f"the batch could not be run: ask the operator about job {job_id}"
    error = {"code": "batch_failed", "message": said, "line": None, "param": None}
    return BatchEnd(BatchStatus.FAILED, errors=(error,))


def _status(batch: BatchRow, job: JobRow) -> BatchStatus:
    if job.state is JobState.CANCELLED:
        is_late = batch.cancelling_at is None and deadline_passed(job.stop_reason)
        return BatchStatus.EXPIRED if is_late else BatchStatus.CANCELLED
    return BatchStatus.COMPLETED  # also where every request failed: the error file says why


@dataclass(slots=True)
class _Counts:
    lines: int = 0
    stopped: int = 0  # of these, not done because the batch was stopped


def _made(
    shelf: Shelf, batch: BatchRow, status: BatchStatus, source: Path, kind: str
) -> tuple[_Counts, StoredFile | None]:
    """One of the two files, with its counts; None if it would be empty."""
    counts, digest, size = _Counts(), hashlib.sha256(), 0
    place = shelf.uploads / uuid4().hex
    try:
        with new_file(place, shelf.access) as file:
            for line in _lines(source, batch.model or "", status, counts):
                digest.update(line)
                size += file.write(line)
            file.flush()
            os.fsync(file.fileno())
        if not size:
            return counts, None
        file_id = new_id(FILE)
        shelf.keep(place, file_id)
    finally:
        place.unlink(missing_ok=True)
    name = f"{batch.batch_id}_{kind}.jsonl"
    made = StoredFile(file_id, batch.tenant, Purpose.OUTPUT, name, size, digest.hexdigest())
    return counts, made


def _lines(source: Path, model: str, status: BatchStatus, counts: _Counts) -> Iterator[bytes]:
    with source.open("rb") as file:
        for line in file:
            value = orjson.loads(line)
            counts.lines += 1
            counts.stopped += _has_stopped(value)
            yield orjson.dumps(as_served(value, model, status), option=orjson.OPT_APPEND_NEWLINE)


def _has_stopped(line: dict[str, Any]) -> bool:
    return (line.get("error") or {}).get("code") == FinishReason.CANCELLED


def as_served(line: dict[str, Any], model: str, status: BatchStatus | None) -> dict[str, Any]:
    """A line of a published file as clients get it."""
    response = line.get("response")
    if response is not None:
        response = {**response, "body": {**response["body"], "model": model}}
        return {**line, "response": response}
    if _has_stopped(line) and status in _STOPPED:
        code, message = _STOPPED[status]
        return {**line, "error": {"code": code, "message": message}}
    return line
