"""The report finds what is wrong with a job, whichever way it came about."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults.in_process import Shop, back_up, shop

from specbatch.jobs.chaos.conservation import census
from specbatch.jobs.chaos.job import ROWS, SAMPLES
from specbatch.pipeline.storage.objects import LocalObjects
from specbatch.schemas.records import JobState, Stage

KEYS = (ROWS - 1) * SAMPLES + 1  # one row is quarantined
FAILED = 1 + SAMPLES  # and another one refused


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with shop(tmp_path_factory.mktemp("shop")) as made:
        yield made


@pytest.fixture(scope="module")
def finished(bed: Shop) -> str:
    """A job that has ended."""
    job_id = bed.submit()
    bed.drain(job_id)
    return job_id


@pytest.fixture
def at_risk(bed: Shop, finished: str, tmp_path: Path) -> Iterator[str]:
    """The same job, which is put back as it was."""
    store, output = bed.folder / "specbatch.db", Path(bed.store.get_job(finished).output_uri)
    back_up(store, tmp_path / "copy.db")
    shutil.copytree(output, tmp_path / "copy")
    yield finished
    back_up(tmp_path / "copy.db", store)
    shutil.rmtree(output)
    shutil.copytree(tmp_path / "copy", output)


def execute(bed: Shop, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(bed.folder / "specbatch.db")) as database:
        assert database.execute(statement, values).rowcount > 0
        database.commit()


def found(bed: Shop, job_id: str) -> str:
    return "\n".join(bed.report(job_id).violations)


def test_a_finished_job_keeps_the_law(bed: Shop, finished: str) -> None:
    report = bed.report(finished)
    assert report.violations == ()
    assert report.state is JobState.PARTIAL
    assert report.census.holds
    assert str(report.census) == (
        f"submitted {KEYS} = ok {KEYS - FAILED} + failed {FAILED} + cancelled 0 + pending 0"
    )


def test_it_holds_at_every_moment_of_a_job(bed: Shop) -> None:
    job_id = bed.submit()
    pending = []
    while not bed.store.get_job(job_id).state.is_final:
        counted = census(bed.store, bed.objects, job_id, bed.expected)
        assert counted.holds, counted
        assert bed.report(job_id).violations == ()
        pending.append(counted.pending)
        bed.do_next(job_id)
    assert pending[0] == KEYS
    assert pending == sorted(pending, reverse=True)
    assert len(set(pending)) > 3


def test_cancelled_rows_are_counted(bed: Shop) -> None:
    job_id = bed.submit()
    for _ in range(4):  # ingest, and one group to its end
        bed.do_next(job_id)
    bed.store.request_cancel(job_id)
    bed.drain(job_id)
    counted = bed.report(job_id).census
    assert counted.holds
    assert counted.cancelled > 0
    assert counted.ok == 4 * SAMPLES


# --- what it finds --------------------------------------------------------------------------
def lose_a_row(bed: Shop, job_id: str) -> None:
    execute(bed, "DELETE FROM completions WHERE job_id = ? AND row_index = 2", job_id)


def open_a_group_again(bed: Shop, job_id: str) -> None:
    """As a write would that does not look at its fencing token."""
    execute(bed, "UPDATE groups SET stage = 'record' WHERE job_id = ? AND group_index = 1", job_id)


def count_twice(bed: Shop, job_id: str) -> None:
    execute(
        bed,
        "UPDATE groups SET completions = 2 * completions WHERE job_id = ? AND group_index = 0",
        job_id,
    )


def charge_a_row_too_much(bed: Shop, job_id: str) -> None:
    execute(
        bed,
        "UPDATE completions SET verify_ticks = verify_ticks + 1 WHERE job_id = ? AND row_index = 2",
        job_id,
    )


def write_another_token(bed: Shop, job_id: str) -> None:
    def change(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rows[0]["token_ids"][0] ^= 1
        return rows

    rewrite(bed, job_id, change)


def write_a_row_twice(bed: Shop, job_id: str) -> None:
    rewrite(bed, job_id, lambda rows: [rows[0], *rows])


def leave_a_row_out(bed: Shop, job_id: str) -> None:
    rewrite(bed, job_id, lambda rows: rows[1:])


def rewrite(
    bed: Shop, job_id: str, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
) -> None:
    """Another part, listed as it is."""
    folder = Path(bed.store.get_job(job_id).output_uri)
    part = folder / "data/part-00000.parquet"
    table = pq.read_table(part)
    pq.write_table(pa.Table.from_pylist(change(table.to_pylist()), schema=table.schema), part)
    listed = LocalObjects().put_bytes(str(part), part.read_bytes())
    manifest = orjson.loads((folder / "manifest.json").read_bytes())
    manifest["parts"][0] |= {"sha256": listed.sha256, "size_bytes": listed.size_bytes}
    (folder / "manifest.json").write_bytes(orjson.dumps(manifest))


def cut_a_file(bed: Shop, job_id: str) -> None:
    part = Path(bed.store.get_job(job_id).output_uri) / "data/part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-7])


def remove_a_file(bed: Shop, job_id: str) -> None:
    (Path(bed.store.get_job(job_id).output_uri) / "data/part-00000.parquet").unlink()


def remove_the_manifest(bed: Shop, job_id: str) -> None:
    (Path(bed.store.get_job(job_id).output_uri) / "manifest.json").unlink()


def leave_a_file(bed: Shop, job_id: str) -> None:
    (Path(bed.store.get_job(job_id).output_uri) / "data/part-00001.parquet").write_bytes(
        b"left over"
    )


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lose_a_row, "the job is partial and 2 are pending"),
        (lose_a_row, "groups say 22 completions, their rows 20"),
        (open_a_group_again, "with 3 groups, of which 2 are done and 0 failed"),
        (count_twice, "groups say"),
        (charge_a_row_too_much, "of verify time, attempts had"),
        (write_another_token, "1 differ from the undisturbed run: row 0 sample 0"),
        (write_another_token, "1 are not in the output as they are in the store"),
        (write_a_row_twice, "1 are in the output more than once: row 0 sample 0"),
        (leave_a_row_out, "1 are not in the output: row 0 sample 0"),
        (cut_a_file, "bytes where"),
        (remove_a_file, "no such file"),
        (remove_the_manifest, "has no manifest.json"),
        (leave_a_file, "files that no manifest lists: data/part-00001.parquet"),
    ],
)
def test_harm_is_found(
    bed: Shop, at_risk: str, harm: Callable[[Shop, str], None], words: str
) -> None:
    assert found(bed, at_risk) == ""
    harm(bed, at_risk)
    assert words in found(bed, at_risk)


def test_a_group_that_was_never_stored_is_found(bed: Shop) -> None:
    job_id = bed.submit()
    while bed.do_next(job_id).stage is not Stage.INGEST:
        pass
    execute(bed, "DELETE FROM groups WHERE job_id = ? AND group_index = 2", job_id)
    counted = census(bed.store, bed.objects, job_id, bed.expected)
    assert not counted.holds
    assert {row for row, _ in counted.lost} == {9, 10, 11}
    assert "≠" in str(counted)


def test_rows_that_nobody_submitted_are_found(bed: Shop, finished: str) -> None:
    fewer = {key: outcome for key, outcome in bed.expected.items() if key[0] != 3}
    counted = census(bed.store, bed.objects, finished, fewer)
    assert counted.unknown == ((3, 0), (3, 1))
    assert not counted.holds
