"""Which rows of a prompts file are a group's, and where unfinished ones stand in the output."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledger.builders import JOB, LEASE_SEC, NO_TIME, RESULTS, completion, new_job, position

from specbatch.pipeline.stages.unfinished import with_unfinished_rows
from specbatch.pipeline.storage.artefacts import write_prompts
from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.storage.prompts import reader, rows_of
from specbatch.schemas.errors import ObjectError
from specbatch.schemas.records import (
    Artefact,
    FinishReason,
    JobRow,
    NewGroup,
    PromptRow,
    Prompts,
    Stage,
)
from support.databases import sqlite_store

# Input rows 3 and 7 are not there: they were refused.
INDEXES = [i for i in range(18) if i not in (3, 7)]
ROWS = [PromptRow(i, f"r{i}", (1, 2, 3), seed=i, n=2) for i in INDEXES]


class Reading(Objects):
    """Counts the files it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    def get_bytes(self, uri: str, expect: Artefact | None = None) -> bytes:
        self.read += 1
        return super().get_bytes(uri, expect)


@pytest.fixture
def objects() -> Reading:
    return Reading()


@pytest.fixture
def files(objects: Reading, tmp_path: Path) -> list[Artefact]:
    """Two files of eight rows. The second one's name sorts first."""
    return [
        objects.put_bytes(f"{tmp_path}/{name}.arrow", write_prompts(ROWS[i * 8 : i * 8 + 8]))
        for i, name in enumerate(("z", "a"))
    ]


@pytest.fixture
def job(tmp_path: Path) -> JobRow:
    return sqlite_store().create_job(new_job(workspace_uri=str(tmp_path)))[0]


def test_a_groups_rows_are_a_slice_of_its_file(
    objects: Reading, job: JobRow, files: list[Artefact]
) -> None:
    assert rows_of(objects, job, Prompts(files[0], 0, 8)) == ROWS[:8]
    assert rows_of(objects, job, Prompts(files[0], 2, 3)) == ROWS[2:5]
    assert rows_of(objects, job, Prompts(files[1], 7, 1)) == ROWS[15:]
    with pytest.raises(ObjectError, match="8 rows, fewer than the store says"):
        rows_of(objects, job, Prompts(files[0], 5, 4))


def test_parts_of_one_file_are_read_once(
    objects: Reading, job: JobRow, files: list[Artefact]
) -> None:
    read = reader(objects, job, files=1)
    parts = [read(Prompts(files[0], start, 2))[0] for start in range(0, 8, 2)]
    assert parts == ROWS[0:8:2]
    assert objects.read == 1


def test_unfinished_rows_stand_where_they_were_in_the_input(
    objects: Reading, files: list[Artefact], tmp_path: Path
) -> None:
    store = sqlite_store(max_attempts=1)
    store.create_job(new_job(workspace_uri=str(tmp_path)))
    work = store.claim_job(JOB, Stage.INGEST, "i", LEASE_SEC)
    assert work is not None
    groups = [
        NewGroup(i, position(), 8, 24, file, Stage.VERIFY, 88, 11) for i, file in enumerate(files)
    ]
    store.add_groups(work.lease, groups, [], 18, position(18))
    store.finish_ingest(work.lease, 18, {})
    for index in (1, 0):  # the later group is cut first, both from behind
        held = store.claim_group(JOB, index, Stage.VERIFY, "w", LEASE_SEC)
        assert held is not None
        split_off = [store.split_group(held.lease, keep) for keep in (6, 4, 2)]
        done = store.claim_group(JOB, split_off[1], Stage.VERIFY, "w", LEASE_SEC)
        assert done is not None
        store.advance(done.lease, Stage.RECORD, RESULTS, NO_TIME)
        record = store.claim_group(JOB, split_off[1], Stage.RECORD, "w", LEASE_SEC)
        assert record is not None
        mine = [row.row_index for row in ROWS[index * 8 + 4 : index * 8 + 6]]
        records = [completion(row, sample) for row in mine for sample in range(2)]
        store.commit_group(record.lease, records, NO_TIME, {})
        store.release(held.lease, "stopped", forgiven=True)
    store.request_cancel(JOB)
    job = store.get_job(JOB)
    read_before = objects.read
    rows = list(with_unfinished_rows(store, objects, job))
    assert [(r.row_index, r.sample_index) for r in rows] == [
        (i, s) for i in INDEXES for s in (0, 1)
    ]
    finished = {r.row_index for r in rows if r.finish_reason is not FinishReason.CANCELLED}
    assert finished == {row.row_index for row in (*ROWS[4:6], *ROWS[12:14])}
    assert objects.read - read_before <= 4, "not once per part"
