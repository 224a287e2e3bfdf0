"""Whole jobs from a table into a table: pinned rows, one commit, only new rows the next night."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from faults.in_process import PLAIN, Died, Shop, armed, shop

from specbatch.jobs.chaos.job import spec_of
from specbatch.jobs.cli.show import table_lines
from specbatch.pipeline.bootstrap import make_client
from specbatch.pipeline.outputs.outputs import read_manifest, read_output
from specbatch.pipeline.runtime.snapshots import last_read, snapshot_of
from specbatch.schemas.crash_points import CrashPoint
from specbatch.schemas.errors import InputError, InUseError, UsageError
from specbatch.schemas.records import DueWork, JobRow, JobState, Stage
from specbatch.schemas.spec import JobSpec, load_spec
from specbatch.schemas.table_spec import OUTPUT_SNAPSHOT, Snapshot
from support import tables
from support.tables import delta, iceberg, prompts, rows_of


def silent(_: DueWork) -> None:
    """Units are found in the store."""


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with shop(tmp_path_factory.mktemp("tables")) as made:
        yield made


def spec(bed: Shop, uri: object, folder: Path, named: str = "out", **parts: Any) -> JobSpec:
    """A job of the stand-in's over a table."""
    values = spec_of(
        PLAIN, str(uri), str(folder / named), bed.verifier, bed.proposer, "stand-in"
    ).model_dump(mode="json", exclude_defaults=True)
    values["sampling"] |= {"n": 1, "logprobs": False}
    values["name"] = folder.name
    if not str(uri).startswith("iceberg"):
        values["input"]["format"] = "delta"
    for name, part in parts.items():
        values[name] = {**values[name], **part}
    return load_spec(values)


def submit(bed: Shop, wanted: JobSpec, key: str | None = None) -> str:
    job, _ = make_client(bed.settings, silent, bed.store).submit(wanted, key)
    return job.job_id


def done(bed: Shop, job_id: str) -> JobRow:
    bed.drain(job_id)
    return bed.store.get_job(job_id)


def read(job: JobRow) -> list[str]:
    return sorted(read_output(job.output_uri)["id"].to_pylist())


def test_a_job_reads_a_delta_table_and_writes_another(bed: Shop, tmp_path: Path) -> None:
    table = delta(tmp_path / "in", prompts("a", "b"), [{"id": "c", "prompt": None}])
    output = {"table": str(tmp_path / "answers"), "keep_columns": ["prompt"]}
    job = done(bed, submit(bed, spec(bed, table, tmp_path, output=output)))
    assert job.state is JobState.PARTIAL, "a row without a prompt is quarantined"
    found = rows_of(tmp_path / "answers")
    whole = {row["id"]: row for row in read_output(job.output_uri).to_pylist()}
    assert sorted(whole) == ["a", "b", "c"]
    assert sorted(row["id"] for row in found) == ["a", "b"]
    for row in found:
        assert row["job"] == job.job_id
        assert {name: row[name] for name in whole["a"]} == whole[row["id"]]
    info = read_manifest(job.output_uri).info
    assert info["input_table"] == {"uri": str(table), "kind": "delta", "snapshot": 1}
    assert info["table"] == {
        "uri": str(tmp_path / "answers"), "kind": "delta", "mode": "append", "rows": 2,
        "snapshot": 1,
    }  # fmt: skip
    assert table_lines(job) == [
        f"input: Delta table {table}, version 1",
        f"table: Delta table {tmp_path}/answers, version 1",
    ]


def test_a_job_reads_what_was_there_when_it_was_submitted(bed: Shop, tmp_path: Path) -> None:
    table = delta(tmp_path / "in", prompts(*"abcdef"))
    wanted = spec(bed, table, tmp_path)
    job_id = submit(bed, wanted, "night-1")
    delta(table, prompts("g"))
    bed.do_next(job_id)  # ingest
    DeltaTable(table).update({"prompt": "'other'"})
    assert submit(bed, wanted, "night-1") == job_id, "what was pinned is not what was asked for"
    job = done(bed, job_id)
    assert read(job) == list("abcdef")
    assert job.spec["input"]["pinned_snapshot"] == 0
    assert read_manifest(job.output_uri).info["input_table"]["snapshot"] == 0
    later = done(bed, submit(bed, spec(bed, table, tmp_path, "later")))
    assert read(later) == list("abcdefg")


def test_a_worker_pins_what_the_submitter_could_not_read(
    bed: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = delta(tmp_path / "in", prompts("a"))
    with monkeypatch.context() as light:
        light.setattr("specbatch.pipeline.runtime.snapshots.can_read_tables", lambda _: False)
        job_id = submit(bed, spec(bed, table, tmp_path))
    assert "pinned when it is read" in table_lines(bed.store.get_job(job_id))[0]
    delta(table, prompts("b"))
    bed.do_next(job_id)
    delta(table, prompts("c"))
    job = done(bed, job_id)
    assert read(job) == ["a", "b"]
    assert table_lines(job)[0].endswith("version 1")
    assert snapshot_of(job) == Snapshot(1, table_id=DeltaTable(table).metadata().id)
    assert read_manifest(job.output_uri).info["input_table"]["snapshot"] == 1


def test_a_version_that_is_vacuumed_meanwhile_fails_the_job(bed: Shop, tmp_path: Path) -> None:
    table = delta(tmp_path / "in", prompts("a"), prompts("b"))
    job_id = submit(bed, spec(bed, table, tmp_path))
    DeltaTable(table).optimize.compact()
    DeltaTable(table).vacuum(0, dry_run=False, enforce_retention_duration=False)
    job = done(bed, job_id)
    assert job.state is JobState.FAILED
    assert "version 1 of Delta table" in (job.error or "")


def test_the_second_night_does_only_new_rows(bed: Shop, tmp_path: Path) -> None:
    table, answers = delta(tmp_path / "in", prompts("a", "b")), tmp_path / "answers"

    def night(number: int) -> str:
        parts = {"input": {"since": "last"}, "output": {"table": str(answers)}}
        return submit(bed, spec(bed, table, tmp_path, f"night-{number}", **parts))

    first = done(bed, night(1))
    assert read(first) == ["a", "b"]
    delta(table, prompts("c"))
    second_id = night(2)
    with pytest.raises(UsageError, match=f"job {second_id} of this name is queued"):
        night(3)
    second = done(bed, second_id)
    assert read(second) == ["c"]
    assert table_lines(second)[0].endswith("version 1, rows since version 0")
    empty = done(bed, night(3))
    assert (empty.state, empty.error) == (JobState.DONE, None)
    assert read(empty) == []
    assert empty.report.get(OUTPUT_SNAPSHOT) is None
    delta(table, prompts("d"))
    cancelled = night(4)
    make_client(bed.settings, silent, bed.store).cancel(cancelled)
    assert done(bed, cancelled).state is JobState.CANCELLED
    assert read(done(bed, night(5))) == ["d"], "a cancelled night has not done its rows"
    assert sorted(row["id"] for row in rows_of(answers)) == ["a", "b", "c", "d"]


def test_a_cancelled_night_with_rows_in_the_table_is_retried_before_the_next(
    bed: Shop, tmp_path: Path
) -> None:
    table, answers = delta(tmp_path / "in", prompts(*"abcdefgh")), tmp_path / "answers"

    def night(number: int) -> str:
        parts = {"input": {"since": "last"}, "output": {"table": str(answers)}}
        return submit(bed, spec(bed, table, tmp_path, f"night-{number}", **parts))

    first = night(1)
    while not bed.store.progress(first).rows_done:
        bed.do_next(first)
    make_client(bed.settings, silent, bed.store).cancel(first)
    with pytest.raises(InUseError, match=f"job {first} of this name is being cancelled"):
        night(2)
    assert done(bed, first).state is JobState.CANCELLED
    with pytest.raises(UsageError, match=r"is cancelled, and its rows are in the table: `spec"):
        night(2)
    bed.store.retry_job(first)
    done(bed, first)
    assert read(done(bed, night(2))) == []
    assert sorted(row["id"] for row in rows_of(answers)) == list("abcdefgh")


def test_the_last_job_of_a_name_is_found_however_many_came_later(
    bed: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbatch.pipeline.runtime.snapshots.PAGE", 1)
    table, other = delta(tmp_path / "in", prompts("a")), delta(tmp_path / "other", prompts("x"))
    wanted = spec(bed, table, tmp_path)
    first = done(bed, submit(bed, wanted))
    for number in range(2):
        done(bed, submit(bed, spec(bed, other, tmp_path, f"other-{number}")))
    asked = (bed.store, wanted.input, wanted.tenant, wanted.name)
    pinned = Snapshot(0, table_id=DeltaTable(table).metadata().id)
    assert last_read(*asked) == pinned
    later = submit(bed, spec(bed, table, tmp_path, "later"))
    assert last_read(*asked, but=later) == pinned
    assert last_read(*asked, but=first.job_id) is None
    with pytest.raises(UsageError, match=f"job {later} of this name is queued"):
        last_read(*asked)


@pytest.mark.parametrize("point", [CrashPoint.UPLOAD, CrashPoint.MANIFEST])
def test_a_publication_that_dies_commits_once(bed: Shop, tmp_path: Path, point: CrashPoint) -> None:
    table = delta(tmp_path / "in", prompts("a", "b", "c"))
    job_id = submit(bed, spec(bed, table, tmp_path, output={"table": str(tmp_path / "answers")}))
    while bed.store.get_job(job_id).stage is not Stage.PUBLISH:
        bed.do_next(job_id)

    def die(at: CrashPoint) -> None:
        if at is point:
            raise Died

    with armed(die):
        bed.do_next(job_id)
    version = DeltaTable(tmp_path / "answers").version()
    assert version == (1 if point is CrashPoint.MANIFEST else 0)
    job = done(bed, job_id)
    assert job.state is JobState.DONE
    assert DeltaTable(tmp_path / "answers").version() == 1
    assert job.report[OUTPUT_SNAPSHOT] == "1"
    assert len(rows_of(tmp_path / "answers")) == 3


def test_a_retry_of_a_cancelled_job_replaces_its_rows(bed: Shop, tmp_path: Path) -> None:
    table, answers = delta(tmp_path / "in", prompts(*"abcdefgh")), tmp_path / "answers"
    job_id = submit(bed, spec(bed, table, tmp_path, output={"table": str(answers)}))
    while not bed.store.progress(job_id).rows_done:
        bed.do_next(job_id)
    make_client(bed.settings, silent, bed.store).cancel(job_id)
    assert done(bed, job_id).state is JobState.CANCELLED
    assert len(rows_of(answers)) == 4
    assert bed.store.retry_job(job_id) > 0
    job = done(bed, job_id)
    assert (job.state, job.report[OUTPUT_SNAPSHOT]) == (JobState.DONE, "2")
    assert sorted(row["id"] for row in rows_of(answers)) == list("abcdefgh")


def test_a_table_that_cannot_take_the_rows_fails_the_job_before_it_computes(
    bed: Shop, tmp_path: Path
) -> None:
    table, other = delta(tmp_path / "in", prompts("a")), delta(tmp_path / "other", prompts("x"))
    job = done(bed, submit(bed, spec(bed, table, tmp_path, output={"table": str(other)})))
    assert job.state is JobState.FAILED
    assert "has no column `row_index`" in (job.error or "")
    assert job.groups_total == 0


def test_a_missing_table_is_refused_at_submission(bed: Shop, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no Delta table"):
        submit(bed, spec(bed, tmp_path / "none", tmp_path))


def test_a_job_reads_and_writes_iceberg(
    bed: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = tables.iceberg_catalog(tmp_path / "lake", monkeypatch)
    uri = iceberg(catalog, "prompts", prompts("a", "b"))
    first = catalog.load_table("lake.prompts").current_snapshot().snapshot_id
    answers = f"iceberg://{tables.CATALOG}/lake.answers"
    parts = {"input": {"since": "last"}, "output": {"table": answers}}
    job_id = submit(bed, spec(bed, uri, tmp_path, **parts))
    catalog.load_table("lake.prompts").append(pa.Table.from_pylist(prompts("c")))
    job = done(bed, job_id)
    assert read(job) == ["a", "b"]
    made = catalog.load_table("lake.answers")
    assert table_lines(job) == [
        f"input: Iceberg table {uri}, snapshot {first}",
        f"table: Iceberg table {answers}, snapshot {made.current_snapshot().snapshot_id}",
    ]
    second = done(bed, submit(bed, spec(bed, uri, tmp_path, "second", **parts)))
    assert read(second) == ["c"]
    found = catalog.load_table("lake.answers").scan().to_arrow()
    assert sorted(found["id"].to_pylist()) == ["a", "b", "c"]
