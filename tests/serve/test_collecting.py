"""How a batch ends, by its job's state and by what the job left of its output."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from serve.conftest import jsonl

from specbatch.jobs.serve.collecting import collect
from specbatch.jobs.serve.file_store import FileStore
from specbatch.pipeline.outputs.names import OPENAI
from specbatch.schemas.records import JobRow, JobState, Stage
from specbatch.schemas.serving import BatchPhase, BatchRow, BatchStatus

BATCH = "batch_" + "0" * 31
ANSWER = {"custom_id": "a", "response": {"body": {"model": "/a/folder"}}, "error": None}
ERROR = {"custom_id": "b", "response": None, "error": {"code": "error", "message": "too long"}}
CONTENT = dict(zip(OPENAI, (jsonl(ANSWER), jsonl(ERROR)), strict=True))
BOTH = {
    JobState.DONE: BatchStatus.COMPLETED,
    JobState.PARTIAL: BatchStatus.COMPLETED,
    JobState.FAILED: BatchStatus.COMPLETED,  # as one is of which every row failed
    JobState.CANCELLED: BatchStatus.CANCELLED,
}


@pytest.mark.parametrize("left", [(), OPENAI[:1], OPENAI[1:], OPENAI])
@pytest.mark.parametrize("state", BOTH)
def test_a_batch_ends_whatever_its_job_left(
    state: JobState, left: Sequence[str], tmp_path: Path
) -> None:
    """A publication that failed may have left one of the two files."""
    file_store = FileStore(tmp_path)
    file_store.make()
    folder = file_store.output_of(BATCH)
    folder.mkdir()
    for name in left:
        (folder / name).write_bytes(CONTENT[name])
    batch = BatchRow(
        *(BATCH, "acme", "/v1/completions", "file-" + "0" * 31, "24h", 1.0, 86_401.0),
        *(BatchPhase.RUNNING, file_store.service_id),
        model="small",
    )
    end = collect(file_store, batch, job_in(state))
    if left == OPENAI:
        assert (end.status, end.completed, end.failed) == (BOTH[state], 1, 1)
        assert end.output is not None
        assert end.errors_file is not None
        return
    cancelled = state is JobState.CANCELLED
    assert end.status == (BatchStatus.CANCELLED if cancelled else BatchStatus.FAILED)
    assert (end.output, end.errors_file) == (None, None)
    assert not list(itertools.chain(file_store.uploads.iterdir(), file_store.files.iterdir()))


def job_in(state: JobState) -> JobRow:
    return JobRow(
        job_id="0123456789abc", name="night", tenant="acme", spec={}, spec_digest="",
        state=state, stage=Stage.END, verifier="v", proposer=None, output_uri="out",
        workspace_uri="w", idempotency_key=None, cancel_requested=False, error=None, rows_total=2,
        groups_total=1, prompt_tokens=9, created_at=1.0, started_at=2.0, finished_at=3.0,
    )  # fmt: skip
