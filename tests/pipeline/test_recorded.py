"""What a job gave, whole, from its own files: where the store keeps less of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ledger.builders import JOB, NO_TIME, completion, new_group, new_job, position

from specbatch.pipeline.stages.whole_results import (
    put_kept,
    put_rejected,
    recorded,
    rejected_whole,
)
from specbatch.pipeline.storage.artefacts import write_prompts, write_results
from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.storage.workspace import delete_own, put_own, read_own
from specbatch.schemas.encryption import Cipher
from specbatch.schemas.errors import ObjectError, UsageError
from specbatch.schemas.privacy import NOT_KEPT, PrivacyMode
from specbatch.schemas.records import (
    CompletionRecord,
    JobRow,
    Lease,
    PromptRow,
    RejectedRow,
    Stage,
)
from specbatch.schemas.spec import load_spec
from support.databases import sqlite_store

SPEC = load_spec({"input": {"uri": "in"}, "output": {"uri": "out"}, "verifier": "big"})
BAD = [RejectedRow(8, "Anna", "bad_id", "the id 'Anna'"), RejectedRow(9, None, "bad_id", "x")]


def text_of(ids: object) -> str:
    return f"text of {ids}"


def whole(row: int) -> CompletionRecord:
    return completion(row, text="", token_ids=(row, 8, 9), top_logprobs=None)


def kept(row: int) -> CompletionRecord:
    return completion(row, text="", token_ids=(NOT_KEPT,) * 3, row_id="hash")


class Place:
    """A job of two groups of four rows, and its workspace."""

    def __init__(self, folder: Path) -> None:
        self.objects = Objects(cipher=Cipher([bytes(32)]))
        self.store = sqlite_store()
        order = new_job(workspace_uri=str(folder / JOB), privacy=PrivacyMode.HASH_ONLY)
        self.job, _ = self.store.create_job(order)
        lease = self.claim_job(Stage.INGEST)
        groups = []
        for index in range(2):
            rows = [PromptRow(r, f"row-{r}", (1,), 1) for r in range(index * 4, index * 4 + 4)]
            name = f"prompts-{index:08d}.arrow"
            made = put_own(self.objects, self.job, name, write_prompts(rows))
            group = new_group(index)
            groups.append(replace(group, rows=4, prompt_tokens=4, prompts=made))
        put_rejected(self.objects, self.job, BAD)
        less = [RejectedRow(row.row_index, None, row.code, "") for row in BAD]
        self.store.add_groups(lease, groups, less, 10, position(10))
        self.store.finish_ingest(lease, 10, {})

    def claim_job(self, stage: Stage) -> Lease:
        work = self.store.claim_job(JOB, stage, "w", 60.0)
        assert work is not None
        return work.lease

    def verify(self, index: int) -> Lease:
        work = self.store.claim_group(JOB, index, Stage.VERIFY, "w", 60.0)
        assert work is not None
        return work.lease

    def do(self, index: int, *rows: int) -> None:
        """Verify and record rows of a group."""
        lease = self.verify(index)
        data = write_results([whole(row) for row in rows], {})
        name = f"results-{index:08d}-{lease.token}.arrow"
        results = put_own(self.objects, self.job, name, data)
        self.store.advance(lease, Stage.RECORD, results, NO_TIME)
        work = self.store.claim_group(JOB, index, Stage.RECORD, "w", 60.0)
        assert work is not None
        self.store.commit_group(work.lease, [kept(row) for row in rows], NO_TIME, {})

    def stop(self, index: int, *rows: int) -> None:
        """Keep these rows of a group that is stopped."""
        lease = self.verify(index)
        report = put_kept(self.objects, self.job, lease, [whole(row) for row in rows], {})
        self.store.keep_part(lease, [kept(row) for row in rows], NO_TIME, report)

    @property
    def row(self) -> JobRow:
        return self.store.get_job(JOB)

    def found(self) -> list[tuple[int, str]]:
        records = recorded(self.store, self.objects, self.row, SPEC, text_of)
        return [(record.row_index, record.text) for record in records]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_all_rows_come_in_order_with_their_texts(place: Place) -> None:
    place.do(1, 4, 5, 6, 7)
    place.do(0, 0, 1, 2, 3)
    assert place.found() == [(row, text_of((row, 8, 9))) for row in range(8)]


def test_rows_that_were_finished_before_a_stop_are_among_them(place: Place) -> None:
    place.stop(1, 5, 7)
    assert place.found() == [(row, text_of((row, 8, 9))) for row in (5, 7)]
    place.do(0, 0, 1, 2, 3)
    place.store.request_cancel(JOB)
    place.store.finish_job(place.claim_job(Stage.PUBLISH), place.row.state.CANCELLED)
    place.store.retry_job(JOB)
    place.do(1, 4, 6)
    assert [row for row, _ in place.found()] == list(range(8))


def test_quarantined_rows_have_their_ids_and_reasons(place: Place) -> None:
    assert list(rejected_whole(place.store, place.objects, place.row)) == BAD
    (uri,) = [f.uri for f in place.objects.list(place.job.workspace_uri) if "rejected" in f.uri]
    place.objects.put_bytes(uri, b"[]")
    with pytest.raises(ObjectError, match="is not encrypted"):
        list(rejected_whole(place.store, place.objects, place.row))
    place.objects.delete(uri)
    with pytest.raises(ObjectError, match=r"quarantined row 8 .* is in no file"):
        list(rejected_whole(place.store, place.objects, place.row))


def test_files_are_bound_to_their_job_and_name(place: Place) -> None:
    one = put_own(place.objects, place.job, "one", b"data")
    assert put_own(place.objects, place.job, "one", b"data") == one, "written again, it is the same"
    other = put_own(place.objects, place.job, "other", b"data")
    assert other.sha256 != one.sha256
    assert read_own(place.objects, place.job, one) == b"data"
    moved = place.objects.put_bytes(other.uri, place.objects.get_bytes(one.uri))
    with pytest.raises(ObjectError, match="copied from elsewhere"):
        read_own(place.objects, place.job, moved)
    with pytest.raises(UsageError, match="is encrypted: set SPECBATCH_ENCRYPTION_KEY"):
        read_own(Objects(), place.job, one)
    with pytest.raises(UsageError, match="set SPECBATCH_ENCRYPTION_KEY on its workers"):
        put_own(Objects(), place.job, "one", b"data")


def test_files_go_with_the_job_and_no_others(place: Place, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"x")
    assert delete_own(place.objects, place.job) == 3
    assert (tmp_path / "other").exists()
    elsewhere, _ = place.store.create_job(new_job("another0000001", workspace_uri=str(tmp_path)))
    with pytest.raises(ObjectError, match="is not the workspace of job"):
        delete_own(place.objects, elsewhere)
