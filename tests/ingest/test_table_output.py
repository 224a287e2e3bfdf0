"""Tables as outputs: the finished rows of a job, committed once, whoever dies in between."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import duckdb
import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable, write_deltalake
from ingest.making import completion, make_spec, write_parquet

from specbatch.pipeline.inputs.sources import open_source
from specbatch.pipeline.outputs.outputs import Manifest, OutputWriter, read_manifest
from specbatch.pipeline.outputs.parts import Kept
from specbatch.pipeline.outputs.table_output import check_apart, commit_rows, prepare, table_schema
from specbatch.pipeline.stages.remainder import write_remainder
from specbatch.pipeline.stages.tables import check_key, prepare_table
from specbatch.pipeline.storage import delta, iceberg
from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.storage.tables import Commit
from specbatch.schemas.arrow import OUTPUT
from specbatch.schemas.errors import FencedError, ObjectError, OutputError, SpecError
from specbatch.schemas.records import CompletionRecord, FinishReason, RejectedRow
from specbatch.schemas.spec import load_spec
from specbatch.schemas.table_spec import TableSpec
from support import forks, tables
from support.tables import rows_of

JOB = "0198f3a1b2c"
BAD = completion(3, finish_reason=FinishReason.ERROR, error="it failed")
HELD = completion(4, finish_reason=FinishReason.REVIEW)
FINISHED = [completion(0), completion(0, 1), completion(2, finish_reason=FinishReason.LENGTH)]
DONE = [*FINISHED, BAD, HELD]
REJECTED = [RejectedRow(1, None, "bad_json", "no JSON")]


def publish(
    folder: Path,
    spec: TableSpec,
    records: Sequence[CompletionRecord] = DONE,
    job_id: str = JOB,
    objects: Objects | None = None,
    output: str = "",
) -> Manifest:
    """As the stage does it: parts, commit, manifest."""
    objects, uri = objects or Objects(), output or str(folder / f"out-{job_id}")
    writer = OutputWriter(objects, uri, job_id, rows_per_part=2)

    def commit(parts: Sequence[Any]) -> dict[str, Any]:
        done = commit_rows(spec, objects, job_id, uri, parts)
        return {"table": {"rows": done.rows, "snapshot": done.snapshot}}

    return writer.write(records, REJECTED, commit=commit)


def committed(manifest: Manifest) -> tuple[int, int | None]:
    return manifest.info["table"]["rows"], manifest.info["table"]["snapshot"]


def places(rows: Sequence[dict[str, Any]]) -> list[tuple[int, int, str, str]]:
    return sorted((r["row_index"], r["sample_index"], r["text"], r["job"]) for r in rows)


EXPECTED = [(r.row_index, r.sample_index, r.text, JOB) for r in FINISHED]


# --- Delta --------------------------------------------------------------------------------------
def test_finished_rows_are_appended_and_the_manifest_names_the_version(tmp_path: Path) -> None:
    table = TableSpec(uri=str(tmp_path / "t"))
    manifest = publish(tmp_path, table)
    assert committed(manifest) == (3, 1)
    assert read_manifest(str(tmp_path / f"out-{JOB}")) == manifest
    assert places(rows_of(tmp_path / "t", 1)) == EXPECTED
    row = next(r for r in rows_of(tmp_path / "t") if r["row_index"] == 2)
    assert (row["finish_reason"], row["token_ids"], row["id"]) == ("length", [5, 6, 2], "r2")
    assert publish(tmp_path, table, job_id="b").info["table"]["snapshot"] == 2
    assert len(rows_of(tmp_path / "t")) == 6


def test_duckdb_reads_what_was_committed(tmp_path: Path) -> None:
    """Through pyarrow: its own extension for Delta has to be downloaded."""
    publish(tmp_path, TableSpec(uri=str(tmp_path / "t")))
    answers = DeltaTable(tmp_path / "t").to_pyarrow_dataset()  # noqa: F841 - DuckDB finds it by name
    found = duckdb.sql("SELECT id, text, len(token_ids) FROM answers ORDER BY ALL").fetchall()
    assert found == [("r0", "text 0/0", 3), ("r0", "text 0/1", 3), ("r2", "text 2/0", 3)]


def test_a_publication_that_is_repeated_commits_nothing(tmp_path: Path) -> None:
    table = TableSpec(uri=str(tmp_path / "t"))
    first = publish(tmp_path, table)
    publish(tmp_path, table, job_id="b")
    again = publish(tmp_path, table)
    assert committed(again) == committed(first)
    assert DeltaTable(tmp_path / "t").version() == 2


def test_other_rows_of_the_same_job_replace_the_earlier_ones(tmp_path: Path) -> None:
    table = TableSpec(uri=str(tmp_path / "t"))
    publish(tmp_path, table)
    publish(tmp_path, table, job_id="b")
    mended = [*FINISHED, completion(3), HELD]
    assert committed(publish(tmp_path, table, mended)) == (4, 3)
    found = places(rows_of(tmp_path / "t"))
    assert [row for row in found if row[3] == JOB] == [*EXPECTED, (3, 0, "text 3/0", JOB)]
    assert len([row for row in found if row[3] == "b"]) == 3
    assert committed(publish(tmp_path, table, mended)) == (4, 3)
    assert committed(publish(tmp_path, table, DONE)) == (3, 4), "and back"


def test_a_job_without_finished_rows_commits_nothing(tmp_path: Path) -> None:
    table = TableSpec(uri=str(tmp_path / "t"))
    assert committed(publish(tmp_path, table, [BAD])) == (0, None)
    assert rows_of(tmp_path / "t") == []
    assert DeltaTable(tmp_path / "t").version() == 0


def test_merging_replaces_rows_with_the_same_key(tmp_path: Path) -> None:
    table = TableSpec(uri=str(tmp_path / "t"), mode="merge")
    assert committed(publish(tmp_path, table)) == (3, 1)
    later = [completion(0, text="better"), completion(5)]
    assert committed(publish(tmp_path, table, later, job_id="b")) == (2, 2)
    assert places(rows_of(tmp_path / "t")) == [
        (0, 0, "better", "b"), (0, 1, "text 0/1", JOB), (2, 0, "text 2/0", JOB),
        (5, 0, "text 5/0", "b"),
    ]  # fmt: skip
    assert committed(publish(tmp_path, table, later, job_id="b")) == (2, 2)


# What a job publishes one after the other, beside another job's row of the input row 7.
AGAIN = {
    "fewer": ([completion(0), completion(2)], [completion(0)], [(0, 0)]),
    "another": ([completion(0, 1)], [completion(0, 0)], [(0, 0)]),
    "none": ([completion(0)], [BAD], []),
    "none and back": ([BAD], [completion(0)], [(0, 0)]),
    "more": ([completion(0)], [completion(0), completion(7)], [(0, 0), (7, 0)]),
}


def check_published_again(
    folder: Path, spec: TableSpec, case: str, read: Callable[[], list[dict[str, Any]]]
) -> None:
    """A job that merges publishes other rows than before, and once more."""
    before, after, left = AGAIN[case]
    publish(folder, spec, [completion(7), completion(8)], job_id="b")
    publish(folder, spec, before)
    done = committed(publish(folder, spec, after))
    found = sorted((r["row_index"], r["sample_index"], r["job"]) for r in read())
    mine = [(*place, JOB) for place in left]
    others = [(row, 0, "b") for row in (7, 8) if (row, 0) not in left]
    assert found == sorted([*mine, *others])
    assert committed(publish(folder, spec, after)) == done


@pytest.mark.parametrize("case", AGAIN)
def test_a_merge_replaces_what_its_job_committed_before(tmp_path: Path, case: str) -> None:
    """As of the best sample of a row, once a better one was released."""
    table = tmp_path / "t"
    check_published_again(
        tmp_path, TableSpec(uri=str(table), mode="merge"), case, lambda: rows_of(table)
    )


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (["id"], "two rows have the same id, which is output.table.key"),
        (["proposer"], "a row has null in `proposer` of output.table.key"),
        (["topic"], "output.table.key names column `topic`, which the output does not have"),
    ],
)
def test_a_key_that_names_no_row_is_refused(tmp_path: Path, key: list[str], words: str) -> None:
    table = TableSpec(uri=str(tmp_path / "t"), mode="merge", key=tuple(key))
    rows = [completion(0, proposer=None), completion(0, 1, proposer=None)]
    with pytest.raises(OutputError, match=words):
        publish(tmp_path, table, rows)


@pytest.mark.parametrize(
    ("output", "table", "refused"),
    [
        ("x/t", "x/t", True), ("x/t/", "file:///x/t", False), ("/x/t/", "file:///x/t", True),
        ("x/t/nights/1", "x/t", True), ("x/out", "x/out/data", True),
        ("x/out", "x/out/data/t", True), ("x/out", "x/out/table", False), ("x/t2", "x/t", False),
        ("s3://b/t/out", "s3://b/t/", True), ("out", "iceberg://nights/lake.t", False),
    ],
)  # fmt: skip
def test_an_output_and_its_table_lie_apart(output: str, table: str, refused: bool) -> None:
    spec = TableSpec(uri=table)
    with pytest.raises(OutputError, match="lie in one another") if refused else nullcontext():
        check_apart(spec, output)


def test_a_key_that_cannot_be_compared_is_refused_before_the_job(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    spec = TableSpec(uri=uri, mode="merge", key=("token_ids",))
    with pytest.raises(OutputError, match=r"key names column `token_ids`, which is list<.*: name"):
        prepare(spec, Objects(), OUTPUT, makes=False)
    with pytest.raises(OutputError, match="partition_by names column `token_ids`, which is list"):
        prepare(TableSpec(uri=uri, partition_by=("token_ids",)), Objects(), OUTPUT, makes=False)


def publish_kept(folder: Path, spec: TableSpec, cells: pa.Array) -> int:
    """Publish rows whose kept column `k` has these cells; how many the table has then."""
    uri, kept = str(folder / "out"), pa.RecordBatch.from_arrays([cells], ["k"])

    def commit(parts: Sequence[Any]) -> dict[str, Any]:
        return {"table": commit_rows(spec, Objects(), JOB, uri, parts).rows}

    rows = [completion(row) for row in range(len(cells))]
    OutputWriter(Objects(), uri, JOB).write(
        rows, [], commit=commit, kept=Kept(kept.schema, iter([kept]))
    )
    return len(rows_of(Path(spec.uri)))


def test_keys_are_compared_as_the_table_has_them(tmp_path: Path) -> None:
    spec = TableSpec(uri=str(tmp_path / "t"), mode="merge", key=("k",))
    times = pa.array([1_001, 1_002], pa.timestamp("ns"))
    with pytest.raises(OutputError, match="two rows have the same k, which is"):
        publish_kept(tmp_path, spec, times)
    assert rows_of(tmp_path / "t") == []


def test_a_key_of_many_words_may_be_a_dictionary(tmp_path: Path) -> None:
    """More than are read at once: each batch has a dictionary of its own."""
    spec = TableSpec(uri=str(tmp_path / "t"), mode="merge", key=("k", "id"))
    words = pa.array([f"w{i % 3000}" for i in range(9000)]).dictionary_encode()
    assert publish_kept(tmp_path, spec, words) == 9000


def test_a_key_may_have_the_reason_of_the_end(tmp_path: Path) -> None:
    spec = TableSpec(
        uri=str(tmp_path / "t"), mode="merge", key=("finish_reason", "id", "sample_index")
    )
    assert committed(publish(tmp_path, spec)) == (3, 1)


@pytest.mark.parametrize("uri", ["/t", "iceberg://nights/lake.t"])
def test_a_key_of_the_job_alone_is_refused(uri: str) -> None:
    """A second publication would find all its rows under one key."""
    with pytest.raises(SpecError, match="key job alone is the same for all rows of a job: add "):
        make_spec("/in", output={"uri": "/o", "table": {"uri": uri, "mode": "merge", "key": "job"}})
    assert TableSpec(uri=uri, key=("job",)).mode == "append"
    assert TableSpec(uri=uri, mode="merge", key=("id", "job"))


def test_samples_that_a_key_does_not_tell_apart_are_refused() -> None:
    def spec(**values: Any) -> Any:
        output = {"uri": "/out", "table": {"uri": "/t", "mode": "merge", "key": "id"}, **values}
        return make_spec("/in", output=output, sampling={"n": 2, "temperature": 1})

    with pytest.raises(SpecError, match="is the same for 2 samples of a row: add sample_index"):
        spec()
    assert spec(keep_best=1).output.keep_best == 1


def test_a_merge_by_numbers_of_rows_is_refused(tmp_path: Path) -> None:
    """Row 0 of the next night would replace row 0 of this one."""
    uri = write_parquet(tmp_path / "in.parquet", {"prompt": ["x"], "day": ["1"], "key": ["a"]})
    context = Mock(objects=Objects())

    def prepared(key: list[str], **columns: str) -> None:
        table = {"uri": str(tmp_path / "-".join(key)), "mode": "merge", "key": key}
        output = {"uri": "/out", "table": table, "keep_columns": ["day"]}
        spec = make_spec(uri, input=columns, output=output)
        source = open_source(spec.input, Objects())
        source.check()
        prepare_table(context, spec, source)

    with pytest.raises(OutputError, match="`id`, which is the row's number"):
        prepared(["id", "sample_index"])
    for key in (["id", "job"], ["id", "day"]):
        prepared(key)
    prepared(["id", "sample_index"], id_column="key")


def test_a_merge_of_json_lines_without_ids_is_refused_before_the_start(tmp_path: Path) -> None:
    uri, table = tmp_path / "in.jsonl", {"uri": str(tmp_path / "t"), "mode": "merge"}
    spec = make_spec(uri, output={"uri": "/out", "table": table})
    for text, is_refused in (
        ('{"prompt": "x"}\n', True),
        ('{"prompt": "x", "id": 1}\n{"prompt": "y"}\n', False),  # the second row is quarantined
        ("", False),
    ):
        uri.write_text(text)
        source = open_source(spec.input, Objects())
        source.check()
        if is_refused:
            with pytest.raises(OutputError, match="`id`, which is the row's number"):
                check_key(spec, source)
        else:
            check_key(spec, source)


def test_a_remainder_is_not_partitioned_by_columns_that_it_lacks(tmp_path: Path) -> None:
    table = {"uri": "/t", "partition_by": ["topic", "finish_reason"]}
    output = {"uri": "/out", "table": table, "keep_columns": ["topic"]}
    job = Mock(job_id=JOB, stop_reason=None)
    left = write_remainder(tmp_path, job, make_spec("/in", output=output), [], [])
    kept = load_spec(yaml.safe_load(left.spec.read_text())).output
    assert kept.table == TableSpec(uri="/t", partition_by=("finish_reason",))
    assert kept.keep_columns == ()


def test_a_remainder_without_the_columns_of_a_key_does_not_merge(tmp_path: Path) -> None:
    table = {"uri": "/t", "mode": "merge", "key": ["topic", "id"]}
    output = {"uri": "/out", "table": table, "keep_columns": ["topic"]}
    job = Mock(job_id=JOB, stop_reason=None)
    left = write_remainder(tmp_path, job, make_spec("/in", output=output), [], [])
    text = left.spec.read_text()
    assert load_spec(yaml.safe_load(text)).output.table is None
    assert f"`specbatch retry {JOB}` instead" in text


def test_a_table_is_made_with_partitions(tmp_path: Path) -> None:
    publish(tmp_path, TableSpec(uri=str(tmp_path / "t"), partition_by=("finish_reason",)))
    assert DeltaTable(tmp_path / "t").metadata().partition_columns == ["finish_reason"]
    assert places(rows_of(tmp_path / "t")) == EXPECTED
    with pytest.raises(OutputError, match="partition_by names column `topic`"):
        prepare(
            TableSpec(uri=str(tmp_path / "u"), partition_by=("topic",)), Objects(), OUTPUT, True
        )


def test_a_table_with_more_columns_gets_null_in_them(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    wider = table_schema(OUTPUT).insert(0, pa.field("loaded_by", pa.string()))
    DeltaTable.create(uri, wider)
    for mode in ("append", "merge"):
        publish(tmp_path, TableSpec(uri=uri, mode=mode), job_id=mode)  # type: ignore[arg-type]  # a parameter
    found = rows_of(tmp_path / "t")
    assert {row["loaded_by"] for row in found} == {None}
    assert len(found) == 3, "merged into the same rows"


def test_a_table_that_cannot_take_the_rows_is_refused_before_the_job(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    write_deltalake(uri, pa.table({"id": ["a"]}))
    with pytest.raises(OutputError, match=f"Delta table {uri} has no column `row_index`: add it"):
        prepare(TableSpec(uri=uri), Objects(), OUTPUT, makes=False)
    other = table_schema(OUTPUT)
    place = other.get_field_index("text")
    DeltaTable.create(f"{uri}-2", other.set(place, pa.field("text", pa.int64())))
    with pytest.raises(OutputError, match=r"column `text` of .* is int64, and the output's is str"):
        prepare(TableSpec(uri=f"{uri}-2"), Objects(), OUTPUT, makes=False)
    DeltaTable.create(f"{uri}-3", other.append(pa.field("must", pa.string(), nullable=False)))
    with pytest.raises(OutputError, match=r"column `must` of .* must not be null"):
        prepare(TableSpec(uri=f"{uri}-3"), Objects(), OUTPUT, makes=False)
    with pytest.raises(OutputError, match="column `job` of the input cannot be kept"):
        prepare(
            TableSpec(uri=f"{uri}-4"), Objects(), OUTPUT.append(pa.field("job", pa.string())), True
        )
    for kind, words in ((pa.uint64(), "a table"), (pa.duration("s"), "Delta table .*")):
        wide = OUTPUT.append(pa.field("big", kind))
        with pytest.raises(OutputError, match=rf"column `big` is .*, which {words} cannot hold"):
            prepare(TableSpec(uri=f"{uri}-4"), Objects(), wide, makes=False)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "notes.txt").write_text("x")
    with pytest.raises(OutputError, match="holds files, and no Delta table"):
        prepare(TableSpec(uri=str(tmp_path / "files")), Objects(), OUTPUT, makes=False)
    assert prepare(TableSpec(uri=f"{uri}-5"), Objects(), OUTPUT, makes=False) is None
    assert not Path(f"{uri}-5").exists(), "a check leaves nothing behind"


def test_columns_of_many_types_are_kept(tmp_path: Path) -> None:
    inner = pa.struct([("f", pa.date64())])
    kept = [
        *(("a", pa.uint8()), ("b", pa.timestamp("ns", "Europe/Paris")), ("c", pa.large_string())),
        *(("d", pa.dictionary(pa.int32(), pa.string())), ("e", pa.list_(inner))),
        ("g", pa.timestamp("s")),
    ]
    columns = pa.schema([*OUTPUT, *(pa.field(name, kind) for name, kind in kept)])
    spec = TableSpec(uri=str(tmp_path / "t"))
    made = prepare(spec, Objects(), columns, makes=True)
    assert prepare(spec, Objects(), columns, makes=False).version() == made.version() == 0


def test_of_two_publishers_at_once_one_commits(tmp_path: Path) -> None:
    """One was frozen after it had looked, and wakes up when the other is done."""
    spec = TableSpec(uri=str(tmp_path / "t"))
    frozen = prepare(spec, Objects(), OUTPUT, makes=True)
    publish(tmp_path, spec)
    schema = delta.arrow_schema(frozen)
    for number in (commit_of(rows_of(tmp_path / "t"), spec), Commit(JOB, "f" * 64)):
        assert delta.committed(frozen, number) == (False, None)
        with pytest.raises(ObjectError, match="another writer was faster") as caught:
            delta.append(spec.uri, frozen, number, schema, schema.empty_table().to_batches, False)
        assert caught.value.passing
    assert len(rows_of(tmp_path / "t")) == 3


def commit_of(_: Any, spec: TableSpec) -> Commit:
    """What the job has committed."""
    found = DeltaTable(spec.uri).history()[0]
    return Commit(found["specbatch_job"], found["specbatch_rows_sha256"])


def test_a_worker_that_lost_its_lease_commits_nothing(tmp_path: Path) -> None:
    spec = TableSpec(uri=str(tmp_path / "t"))

    def lost() -> None:
        raise FencedError("another one has it")

    with pytest.raises(FencedError):
        commit_rows(spec, Objects(), JOB, str(tmp_path), [], lost)
    assert not (tmp_path / "t").exists()


PUBLISH = """
import os, signal, sys
from pathlib import Path
from ingest.test_table_output import JOB, publish
from specbatch.pipeline.outputs import table_output
from specbatch.pipeline.storage import delta, iceberg
from specbatch.schemas import crash_points
from specbatch.schemas.crash_points import CrashPoint
from specbatch.schemas.table_spec import TableSpec

folder, point, uri, mode = Path(sys.argv[1]), *sys.argv[2:5]

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def before(name, module):
    setattr(module, name, lambda *_, **__: die())

if point == "manifest":
    crash_points.arm(lambda at: die() if at is CrashPoint.MANIFEST else None)
elif point == "commit":
    for name, module in (("append", delta), ("merge", delta), ("write", iceberg)):
        before(name, module)
elif point == "midst":
    whole = table_output._Rows._finished
    def some(self, columns, part=None):
        for number, batch in enumerate(whole(self, columns, part)):
            if columns is None and number:
                die()
            yield batch
        if columns is None and part:
            die()
    table_output._Rows._finished = some
publish(folder, TableSpec(uri=uri, mode=mode))
"""


def publish_and_die(folder: Path, point: str, uri: str, mode: str, **environment: str) -> None:
    done = forks.run(
        *("-c", PUBLISH, str(folder), point, uri, mode),
        environment=environment,
        cwd=folder,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.pipeline
@pytest.mark.parametrize("mode", ["append", "merge"])
def test_a_job_that_is_killed_commits_once(tmp_path: Path, mode: Any) -> None:
    spec = TableSpec(uri=str(tmp_path / "t"), mode=mode)
    for point in ("midst", "commit", "manifest", "manifest"):
        publish_and_die(tmp_path, point, spec.uri, mode)
        is_committed = point == "manifest"
        assert places(rows_of(tmp_path / "t")) == (EXPECTED if is_committed else [])
        assert not (tmp_path / f"out-{JOB}" / "manifest.json").exists()
    assert committed(publish(tmp_path, spec)) == (3, 1)
    assert places(rows_of(tmp_path / "t")) == EXPECTED


IN_S3 = """
import sys
from pathlib import Path
from deltalake import DeltaTable
from ingest.test_table_output import FINISHED, committed, completion, publish
from specbatch.pipeline.storage import delta
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.table_spec import TableSpec

bucket, endpoint = sys.argv[1:]
s3, spec = Objects(endpoint), TableSpec(uri=f"{bucket}/lake/answers")
runs = ([], [], [completion(3)])
found = [publish(Path(), spec, [*FINISHED, *more], objects=s3, output=f"{bucket}/out")
         for more in runs]
options = delta.storage_options(spec.uri, s3)
print(*map(committed, found), DeltaTable(spec.uri, storage_options=options).count())
"""


@pytest.mark.usefixtures("s3")
def test_a_table_in_s3_gets_rows(bucket: str, s3_server: str, tmp_path: Path) -> None:
    """In a process of its own: the library lists while it holds Python's lock, which a server in
    this process would wait for."""
    done = forks.run("-c", IN_S3, bucket, s3_server, environment={}, cwd=tmp_path, timeout=120)
    assert done.stdout == "(3, 1) (3, 1) (4, 2) 4\n", done.stderr


# --- Iceberg ------------------------------------------------------------------------------------
ANSWERS = f"iceberg://{tables.CATALOG}/lake.answers"


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return tables.iceberg_catalog(tmp_path / "lake", monkeypatch)


def answers(catalog: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = catalog.load_table("lake.answers").scan().to_arrow().to_pylist()
    return found


def test_iceberg_gets_finished_rows_once(tmp_path: Path, catalog: Any) -> None:
    spec = TableSpec(uri=ANSWERS)
    first = publish(tmp_path, spec)
    assert committed(first) == (
        3,
        catalog.load_table("lake.answers").current_snapshot().snapshot_id,
    )
    assert places(answers(catalog)) == EXPECTED
    publish(tmp_path, spec, job_id="b")
    assert committed(publish(tmp_path, spec)) == committed(first)
    assert len(answers(catalog)) == 6
    mended = [*FINISHED, completion(3)]
    assert committed(publish(tmp_path, spec, mended))[0] == 4
    found = places(answers(catalog))
    assert [row for row in found if row[3] == JOB] == [*EXPECTED, (3, 0, "text 3/0", JOB)]
    assert len(found) == 7
    whole = catalog.load_table("lake.answers").scan().to_arrow()  # noqa: F841 - DuckDB finds it by name
    assert duckdb.sql("SELECT count(*) FROM whole WHERE job = 'b'").fetchall() == [(3,)]


def test_of_two_publishers_to_iceberg_one_commits(tmp_path: Path, catalog: Any) -> None:
    """The library would repeat the commit of the one that wakes up too late."""
    spec = TableSpec(uri=ANSWERS)
    frozen = prepare(spec, Objects(), OUTPUT, makes=True)
    publish(tmp_path, spec)
    again = Commit(JOB, "f" * 64)
    assert iceberg.committed(frozen, again) == (False, None)
    rows = catalog.load_table("lake.answers").scan().to_arrow()
    with pytest.raises(ObjectError, match="another writer was faster") as caught:
        iceberg.write(spec.uri, frozen, again, lambda: iter([rows]), False)
    assert caught.value.passing
    assert places(answers(catalog)) == EXPECTED
    assert "commit.retry.num-retries" not in catalog.load_table("lake.answers").properties


def test_iceberg_merges_rows_by_key(tmp_path: Path, catalog: Any) -> None:
    spec = TableSpec(uri=ANSWERS, mode="merge", partition_by=("finish_reason",))
    publish(tmp_path, spec)
    later = [completion(0, text="better"), completion(5)]
    assert committed(publish(tmp_path, spec, later, job_id="b"))[0] == 2
    assert places(answers(catalog)) == [
        (0, 0, "better", "b"), (0, 1, "text 0/1", JOB), (2, 0, "text 2/0", JOB),
        (5, 0, "text 5/0", "b"),
    ]  # fmt: skip
    [field] = catalog.load_table("lake.answers").spec().fields
    assert field.name == "finish_reason"


def test_iceberg_merges_some_rows_of_an_id_and_keeps_columns_of_others(
    tmp_path: Path, catalog: Any
) -> None:
    schema = table_schema(OUTPUT).append(pa.field("note", pa.string()))
    iceberg.create(ANSWERS, schema, [])
    spec = TableSpec(uri=ANSWERS, mode="merge")
    publish(tmp_path, spec)
    table = catalog.load_table("lake.answers")
    noted = table.scan().to_arrow().drop_columns("note")
    table.overwrite(noted.append_column("note", pa.array(["seen"] * len(noted))))
    publish(tmp_path, spec, [completion(0, 1, text="better"), completion(7)], job_id="b")
    found = catalog.load_table("lake.answers").scan().to_arrow().to_pylist()
    assert sorted((r["id"], r["sample_index"], r["text"], r["note"]) for r in found) == [
        ("r0", 0, "text 0/0", "seen"), ("r0", 1, "better", "seen"), ("r2", 0, "text 2/0", "seen"),
        ("r7", 0, "text 7/0", None),
    ]  # fmt: skip


@pytest.mark.parametrize("case", AGAIN)
def test_a_merge_into_iceberg_replaces_what_its_job_committed_before(
    tmp_path: Path, catalog: Any, case: str
) -> None:
    spec = TableSpec(uri=ANSWERS, mode="merge")
    check_published_again(tmp_path, spec, case, lambda: answers(catalog))


def test_iceberg_merges_into_no_table_with_two_rows_of_one_key(
    tmp_path: Path, catalog: Any
) -> None:
    publish(tmp_path, TableSpec(uri=ANSWERS))
    table = catalog.load_table("lake.answers")
    table.append(table.scan().to_arrow())
    before = table.current_snapshot().snapshot_id
    with pytest.raises(ObjectError, match="two of its rows have the same id, sample_index"):
        publish(tmp_path, TableSpec(uri=ANSWERS, mode="merge"), job_id="b")
    assert catalog.load_table("lake.answers").current_snapshot().snapshot_id == before


def test_of_two_makers_of_an_iceberg_table_one_makes_it(
    catalog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema, looked = table_schema(OUTPUT), iceberg.table_if_there
    iceberg.create(ANSWERS, schema, ["finish_reason"])
    table = catalog.load_table("lake.answers")
    assert [field.name for field in table.spec().fields] == ["finish_reason"]
    assert len(table.metadata.metadata_log) == 0, "it was never there without its partitions"
    before = iter([None])
    monkeypatch.setattr(iceberg, "table_if_there", lambda uri: next(before, None) or looked(uri))
    made = iceberg.create(ANSWERS, schema, ["tag"])
    assert made.metadata.table_uuid == table.metadata.table_uuid


def test_iceberg_tables_of_other_columns_are_refused(tmp_path: Path, catalog: Any) -> None:
    catalog.create_table("lake.answers", schema=pa.schema([("id", pa.int64())]))
    with pytest.raises(OutputError, match=r"column `id` of Iceberg table .* is int64, and"):
        prepare(TableSpec(uri=ANSWERS), Objects(), OUTPUT, makes=False)
    assert committed(publish(tmp_path, TableSpec(uri=f"{ANSWERS}2"), [BAD])) == (0, None)


@pytest.mark.pipeline
def test_a_job_that_is_killed_commits_to_iceberg_once(tmp_path: Path, catalog: Any) -> None:
    environment = tables.environment(tmp_path / "lake")
    for point in ("midst", "commit", "manifest", "manifest"):
        publish_and_die(tmp_path, point, ANSWERS, "append", **environment)
        assert places(answers(catalog)) == (EXPECTED if point == "manifest" else [])
    before = catalog.load_table("lake.answers").current_snapshot().snapshot_id
    assert committed(publish(tmp_path, TableSpec(uri=ANSWERS))) == (3, before)
    assert places(answers(catalog)) == EXPECTED
