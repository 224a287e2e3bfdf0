"""Tables as inputs: the rows of one snapshot, each once and in the same order every time; what
cannot be read so is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from shutil import rmtree
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from ingest.making import make_spec

from specbatch.jobs.cli.checks import check_input_here
from specbatch.pipeline.inputs.kept import kept_schema
from specbatch.pipeline.inputs.planner import plan
from specbatch.pipeline.inputs.rows import RowChecker
from specbatch.pipeline.inputs.sources import open_source
from specbatch.pipeline.inputs.tables import constant, pin, typed
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.errors import InputError, MissingExtraError, SpecError, UsageError
from specbatch.schemas.table_spec import Snapshot
from support import tables
from support.tables import delta, iceberg, prompts


def rows(uri: Path | str, pinned: Snapshot | None = None, **values: Any) -> list[Any]:
    """The ids and prompts that are read."""
    own = values if str(uri).startswith("iceberg") else {"format": "delta", **values}
    spec = make_spec(uri, input=own).input
    source = open_source(spec.pinned_to(pinned) if pinned else spec, Objects())
    source.check()
    return [(row.id, row.prompt) for batch in source.read() for row in batch.rows]


def ids(*given: Any, **values: Any) -> list[str]:
    return sorted(row_id for row_id, _ in rows(*given, **values))


def refusal(uri: Path | str, pinned: Snapshot | None = None, **values: Any) -> str:
    with pytest.raises(InputError) as caught:
        rows(uri, pinned, **values)
    return str(caught.value)


# --- Delta --------------------------------------------------------------------------------------
def test_the_newest_version_is_read_or_the_one_that_is_named(tmp_path: Path) -> None:
    table = delta(tmp_path / "t", prompts("a", "b"), prompts("c"))
    assert ids(table) == ["a", "b", "c"]
    assert ids(table, snapshot=0) == ["a", "b"]
    assert rows(table, snapshot=0) == [("a", "say a"), ("b", "say b")]


def test_a_pinned_version_is_read_in_the_same_order_whatever_is_written_later(
    tmp_path: Path,
) -> None:
    table = delta(tmp_path / "t", *(prompts(f"r{i}") for i in range(6)))
    spec = make_spec(table, input={"format": "delta"}).input
    pinned = pin(spec, Objects())
    assert pinned == Snapshot(5, table_id=DeltaTable(table).metadata().id)
    first = rows(table, pinned)
    delta(table, prompts("new"))
    loaded = DeltaTable(table)
    loaded.create_checkpoint()
    loaded.optimize.compact()
    loaded.delete("id = 'r3'")
    assert rows(table, pinned) == first
    assert len(first) == 6
    assert "r3" not in ids(table)


def test_reading_resumes_where_it_stopped(
    tmp_path: Path, make_checker: Callable[..., RowChecker]
) -> None:
    table = delta(tmp_path / "t", *(prompts(*(f"{c}{i}" for i in range(5))) for c in "abc"))
    spec = make_spec(table, input={"format": "delta", "snapshot": 2})

    def groups(*start: Any) -> list[Any]:
        source = open_source(spec.input, Objects())
        return [g.rows for g in plan(source, make_checker(spec), 4, *start)]

    whole = groups()
    assert sum(map(len, whole)) == 15
    source = open_source(spec.input, Objects())
    first = next(iter(plan(source, make_checker(spec), 4)))
    assert groups(first.cursor, first.next_row, 1) == whole[1:]


def test_columns_that_files_lack_have_their_partition_value_or_are_null(tmp_path: Path) -> None:
    table = tmp_path / "t"
    for day, topic in (("2026-03-01", "a b"), ("2026-03-02", "c/d")):
        data = {"id": [topic], "prompt": ["x"], "day": [day], "topic": [topic]}
        made = pa.table(data).set_column(2, "day", pa.array([day]).cast(pa.date32()))
        write_deltalake(table, made, mode="append", partition_by=["day", "topic"])
    write_deltalake(
        table,
        pa.table({"id": ["later"], "prompt": ["x"], "day": [None], "topic": ["e"], "n": [7]}).cast(
            pa.schema([("id", pa.string()), ("prompt", pa.string()), ("day", pa.date32()),
                       ("topic", pa.string()), ("n", pa.int64())])
        ),
        mode="append",
        schema_mode="merge",
    )  # fmt: skip
    spec = make_spec(
        table, input={"format": "delta", "template": "{topic} on {day}", "tag_column": "topic"}
    ).input
    source = open_source(spec, Objects())
    source.check()
    found = {row.id: (row.tag, row.columns) for b in source.read() for row in b.rows}
    assert {row_id: tag for row_id, (tag, _) in found.items()} == {
        "a b": "a b", "c/d": "c/d", "later": "e",
    }  # fmt: skip
    assert str((found["a b"][1] or {})["day"]) == "2026-03-01"
    schema = kept_schema(source, ("n", "day"))
    assert schema.types == [pa.int64(), pa.date32()]
    kept = pa.Table.from_batches(source.kept_rows(schema)).to_pylist()
    assert sorted((row["n"] or 0) for row in kept) == [0, 0, 7]


def test_only_columns_that_no_file_has_can_be_asked_for(tmp_path: Path) -> None:
    table = tmp_path / "t"
    data = pa.table({"prompt": ["x", "y"], "other": [1, 2]})
    write_deltalake(table, data, partition_by=["prompt"])
    assert sorted(prompt for _, prompt in rows(table)) == ["x", "y"]


MOMENT = datetime(2026, 3, 1, 4, 5, 6, 7, UTC)


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("7", pa.int32(), 7),
        ("true", pa.bool_(), True),
        (None, pa.int32(), None),
        (3, pa.int64(), 3),
        *(
            (f"2026-03-01{t}04:05:06.000007{zone}", pa.timestamp("us", "UTC"), MOMENT)
            for t, zone in ((" ", ""), (" ", "Z"), ("T", "Z"))
        ),
    ],
)
def test_partition_values_have_their_columns_types(text: Any, kind: Any, value: Any) -> None:
    assert typed(text, kind).as_py() == value
    assert typed(text, kind).type == kind


def test_new_rows_have_partitions_by_time(tmp_path: Path) -> None:
    table, moments = tmp_path / "t", pa.timestamp("us", "UTC")
    for name in "ab":
        data = {"id": [name], "prompt": ["x"], "at": pa.array([MOMENT], moments)}
        write_deltalake(table, pa.table(data), mode="append", partition_by=["at"])
    for since, wanted in ((None, ["a", "b"]), (0, ["b"])):
        assert ids(table, since=since, tag_column="at") == wanted
    with pytest.raises(InputError, match="partition value 'noon' of column `at`, which the table"):
        constant("t/a.parquet", pa.field("at", moments), "noon")


@pytest.mark.parametrize("name", ["{}/x.parquet", "file://{}/x.parquet", "../x.parquet",
                                  "%2E%2E/x.parquet", "s3://bucket/x.parquet"])  # fmt: skip
def test_a_file_outside_of_the_table_is_refused_by_name(tmp_path: Path, name: str) -> None:
    table = delta(tmp_path / "t", prompts("a"), prompts("b"))
    log = table / "_delta_log" / f"{1:020d}.json"
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    place = next(entry["add"]["path"] for entry in entries if "add" in entry)
    (table / place).rename(tmp_path / "x.parquet")

    def named(path: str) -> None:
        for entry in entries:
            if "add" in entry:
                entry["add"]["path"] = path
        with_log_entry(table, 1, *entries)

    named(name.format(tmp_path))
    for pinned in (Snapshot(1), Snapshot(1, 0)):
        said = refusal(table, pinned)
        assert "x.parquet lies outside of table" in said, said
    (tmp_path / "x.parquet").rename(table / "x.parquet")
    named(f"{table}/x.parquet")
    assert ids(table) == ["a", "b"], "it may be named whole"


def test_new_rows_are_those_of_added_files(tmp_path: Path) -> None:
    table = delta(tmp_path / "t", prompts("a"), prompts("b"), prompts("c"))
    assert ids(table, since=0) == ["b", "c"]
    assert ids(table, since=2) == []
    DeltaTable(table).optimize.compact()
    delta(table, prompts("d"))
    assert ids(table, since=0) == ["b", "c", "d"], "what was compacted is read where it was added"
    assert ids(table, since=1, snapshot=2) == ["c"]
    DeltaTable(table).delete("id = 'd'")  # its whole file
    assert ids(table, since=0) == ["b", "c"]


def test_new_rows_that_were_compacted_and_deleted_are_refused(tmp_path: Path) -> None:
    """Where the compacted file has rows that were added: which of them are gone is not known."""
    table = delta(tmp_path / "t", prompts("a"), prompts("b"), prompts("c"))
    DeltaTable(table).optimize.compact()
    DeltaTable(table).delete()
    delta(table, prompts("d"))
    assert "version 4 of Delta table" in refusal(table, since=0)
    assert "changed rows (DELETE), so what was added" in refusal(table, since=1)
    assert ids(table, since=2) == ["d"], "all that was compacted had been read before"


def test_changed_rows_are_no_new_ones_and_are_refused(tmp_path: Path) -> None:
    table = delta(tmp_path / "t", prompts("a", "b"), prompts("c"))
    DeltaTable(table).update({"prompt": "'other'"}, predicate="id = 'a'")
    assert refusal(table, since=1) == (
        f"version 2 of Delta table {table} changed rows (UPDATE), so what was added since version "
        "1 is not known: leave since out; reuse_outputs copies what was done before"
    )
    assert ids(table, since=2) == []
    assert refusal(table, Snapshot(1, 2)) == (
        f"version 2 of Delta table {table} comes after version 1: was the table made anew? leave "
        "since out for one night"
    )


def test_a_table_that_was_made_anew_is_not_taken_for_the_one_before(tmp_path: Path) -> None:
    table = delta(tmp_path / "t", prompts("a"), prompts("b"))
    spec = make_spec(table, input={"format": "delta", "since": "last"}).input
    pinned = pin(spec, Objects())
    rmtree(table)
    delta(table, prompts("x"), prompts("y"), prompts("z"))
    assert refusal(table, pinned) == (
        f"Delta table {table} was made again after this job had pinned version 1 of the one "
        "before, which is gone: submit a new job"
    )
    with pytest.raises(InputError) as refused:
        pin(spec, Objects(), lambda: pinned)
    assert str(refused.value) == (
        f"Delta table {table} was made again since the last job of this name has read it, so what "
        "was added since is not known: leave since out for one night"
    )
    assert ids(table, Snapshot(1)) == ["x", "y"], "jobs of earlier versions kept no id"


def test_a_table_that_grew_by_a_merge_with_new_columns_is_the_same(tmp_path: Path) -> None:
    """Such a merge gives the table another id."""
    table = delta(tmp_path / "t", prompts("a"), prompts("b"))
    spec = make_spec(table, input={"format": "delta", "since": "last"}).input
    before = pin(spec, Objects())
    new = pa.Table.from_pylist([{"id": "c", "prompt": "say c", "topic": "x"}])
    merge = DeltaTable(table).merge(
        new, "s.id = t.id", source_alias="s", target_alias="t", merge_schema=True
    )
    merge.when_not_matched_insert_all().execute()
    found = pin(spec, Objects(), lambda: before)
    assert found.table_id != before.table_id
    assert (found.number, found.since) == (2, 1)
    assert ids(table, found) == ["c"]
    assert ids(table, before) == ["a", "b"], "a job that was pinned before reads its version"
    DeltaTable(table).create_checkpoint()
    for version in (0, 1):
        (table / "_delta_log" / f"{version:020d}.json").unlink()
    with pytest.raises(InputError, match="was made again since the last job of this name"):
        pin(spec, Objects(), lambda: before)


def test_a_log_that_was_cleaned_up_tells_nothing_new(tmp_path: Path) -> None:
    table = delta(tmp_path / "t", prompts("a"), prompts("b"), prompts("c"))
    DeltaTable(table).create_checkpoint()
    (table / "_delta_log" / f"{1:020d}.json").unlink()
    assert refusal(table, since=0) == (
        f"version 1 of Delta table {table} is gone from its log, so what was added since is not "
        "known: leave since out for one night"
    )


def test_a_missing_table_and_a_folder_of_something_else_are_refused(tmp_path: Path) -> None:
    nothing = f"{tmp_path}/none is no Delta table: there is no _delta_log with a commit in it"
    assert refusal(tmp_path / "none") == nothing
    with pytest.raises(InputError, match="is no Delta table"):
        check_input_here(make_spec(tmp_path / "none", input={"format": "delta"}).input)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "notes.txt").write_text("none")
    assert "is no Delta table" in refusal(tmp_path / "files")
    log = tmp_path / "damaged" / "_delta_log"
    log.mkdir(parents=True)
    (log / f"{0:020d}.json").write_text("{no json")
    assert str(tmp_path / "damaged") in refusal(tmp_path / "damaged")


def test_a_version_that_is_not_there_is_refused(tmp_path: Path) -> None:
    table = delta(tmp_path / "t", prompts("a"))
    assert refusal(table, snapshot=9).startswith(f"version 9 of Delta table {table} is not there")


def test_a_vacuumed_version_is_refused_in_one_sentence(tmp_path: Path) -> None:
    table = delta(tmp_path / "t", prompts("a"), prompts("b"))
    DeltaTable(table).optimize.compact()
    DeltaTable(table).vacuum(0, dry_run=False, enforce_retention_duration=False)
    said = refusal(table, Snapshot(1))
    assert said.startswith(
        f"version 1 of Delta table {table} cannot be read any more: 2 of its 2 files are gone, as "
        f"{table}/"
    )
    assert said.endswith("perhaps by a vacuum; submit a new job")
    assert ids(table) == ["a", "b"]


def test_a_column_that_the_table_lacks_is_refused(tmp_path: Path) -> None:
    table = delta(tmp_path / "t", [{"id": "a", "text": "x"}])
    with pytest.raises(InputError, match="no column `prompt`; its columns are id, text"):
        rows(table)
    with pytest.raises(InputError, match="no column `prompt`; its columns are id, text"):
        check_input_here(make_spec(table, input={"format": "delta"}).input)


def with_log_entry(table: Path, version: int, *actions: dict[str, Any]) -> None:
    lines = "".join(json.dumps(action) + "\n" for action in actions)
    (table / "_delta_log" / f"{version:020d}.json").write_text(lines)


def test_column_mapping_is_refused_by_name(tmp_path: Path) -> None:
    table = delta(tmp_path / "t", prompts("a"))
    log = table / "_delta_log" / f"{0:020d}.json"
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    for entry in entries:
        if "metaData" in entry:
            entry["metaData"]["configuration"] = {"delta.columnMapping.mode": "name"}
            fields = json.loads(entry["metaData"]["schemaString"])
            for number, field in enumerate(fields["fields"]):
                field["metadata"] = {
                    "delta.columnMapping.id": number + 1,
                    "delta.columnMapping.physicalName": field["name"],
                }
            entry["metaData"]["schemaString"] = json.dumps(fields)
        if "protocol" in entry:
            entry["protocol"] = {
                "minReaderVersion": 3, "minWriterVersion": 7,
                "readerFeatures": ["columnMapping"], "writerFeatures": ["columnMapping"],
            }  # fmt: skip
    with_log_entry(table, 0, *entries)
    assert refusal(table) == (
        f"Delta table {table} has column mapping by name, which is not read: copy it into a table "
        "without"
    )


def test_deletion_vectors_are_refused_by_name(tmp_path: Path) -> None:
    table = delta(tmp_path / "t", prompts(*(f"r{i:02}" for i in range(30))))
    log = table / "_delta_log" / f"{0:020d}.json"
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    add = next(entry["add"] for entry in entries if "add" in entry)
    features = ["deletionVectors"]
    with_log_entry(
        table,
        1,
        {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7,
                      "readerFeatures": features, "writerFeatures": features}},
    )  # fmt: skip
    assert len(ids(table)) == 30, "a table may allow them and have none"
    with_log_entry(
        table,
        2,
        {"remove": {"path": add["path"], "dataChange": True, "deletionTimestamp": 1}},
        {"add": {**add, "deletionVector": SIX_ROWS}},
    )
    assert refusal(table).startswith(
        f"version 2 of Delta table {table} has 1 file with deletion vectors, which are not read"
    )


# Rows 3, 4, 7, 11, 18 and 29, as the protocol has them in its log.
SIX_ROWS = {
    "storageType": "i", "pathOrInlineDv": "^Bg9^0rr910000000000iXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L",
    "sizeInBytes": 40, "cardinality": 6,
}  # fmt: skip


def test_a_delta_table_is_not_read_as_a_folder_of_files(tmp_path: Path) -> None:
    table = delta(tmp_path / "t", prompts("a"))
    with pytest.raises(InputError, match=r"is a Delta table, .* set input.format to delta"):
        open_source(make_spec(table).input, Objects())
    DeltaTable(table).delete()
    assert open_source(make_spec(table, input={"format": "parquet"}).input, Objects()).files


@pytest.mark.parametrize(
    ("uri", "values", "words"),
    [
        ("t", {"snapshot": 1}, "snapshot is for tables"),
        ("t", {"since": "last", "format": "parquet"}, "since is for tables"),
        ("t", {"format": "iceberg"}, "an Iceberg table is named iceberg://"),
        ("iceberg://nights/prompts", {}, "an Iceberg table is named iceberg://"),
        ("iceberg://nights/lake.t", {"format": "csv"}, "leave format csv out"),
        ("t", {"format": "delta", "snapshot": 1, "since": 2}, "since 2 comes after snapshot 1"),
        ("t", {"format": "delta", "since": "yesterday"}, "since"),
    ],
)
def test_a_spec_of_a_table_that_makes_no_sense_is_refused(
    uri: str, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        make_spec(uri, input=values)


def test_a_pin_is_not_in_the_digest(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, input={"format": "delta"})
    snapshot = Snapshot(7, 3, "an id")
    pinned = spec.model_copy(update={"input": spec.input.pinned_to(snapshot)})
    assert pinned.digest() == spec.digest()
    assert type(spec).model_validate(pinned.model_dump(mode="json")).input.pinned == snapshot
    assert Snapshot.of_report(snapshot.to_report()) == snapshot
    named = make_spec(tmp_path, input={"format": "delta", "snapshot": 7})
    assert named.digest() != spec.digest()


def test_without_the_library_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = delta(tmp_path / "t", prompts("a"))
    monkeypatch.setattr("specbatch.schemas.extras.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'specbatch\[tables\]'"):
        rows(table)


def test_a_table_in_s3_is_read(s3: Objects, bucket: str, s3_server: str) -> None:
    options = {
        "AWS_ENDPOINT_URL": s3_server, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
        "conditional_put": "etag",
    }  # fmt: skip
    uri = f"{bucket}/lake/t"
    for name in ("a", "b"):
        data = pa.Table.from_pylist(prompts(name))
        write_deltalake(uri, data, mode="append", storage_options=options)
    spec = make_spec(uri, input={"format": "delta"}).input
    for snapshot, wanted in ((None, ["a", "b"]), (Snapshot(0), ["a"]), (Snapshot(1, 0), ["b"])):
        source = open_source(spec.pinned_to(snapshot) if snapshot else spec, s3)
        assert sorted(row.id for batch in source.read() for row in batch.rows) == wanted
    with pytest.raises(InputError, match="is no Delta table"):
        open_source(make_spec(f"{bucket}/none", input={"format": "delta"}).input, s3)
    with pytest.raises(InputError, match="is a Delta table"):
        open_source(make_spec(uri).input, s3)


# --- Iceberg ------------------------------------------------------------------------------------
@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return tables.iceberg_catalog(tmp_path / "lake", monkeypatch)


def test_a_snapshot_of_iceberg_is_read(catalog: Any) -> None:
    uri = iceberg(catalog, "t", prompts("a", "b"), prompts("c"))
    table = catalog.load_table("lake.t")
    first, second = [one.snapshot_id for one in table.snapshots()]
    assert pin(make_spec(uri).input, Objects()) == Snapshot(
        second, table_id=str(table.metadata.table_uuid)
    )
    assert ids(uri) == ["a", "b", "c"]
    assert ids(uri, snapshot=first) == ["a", "b"]
    assert ids(uri, Snapshot(second, first)) == ["c"]
    assert ids(uri, since=second) == []
    before = rows(uri, Snapshot(second))
    table.append(pa.Table.from_pylist(prompts("d")))
    assert rows(uri, Snapshot(second)) == before


def test_an_iceberg_table_that_was_made_anew_is_not_taken_for_the_one_before(catalog: Any) -> None:
    uri = iceberg(catalog, "t", prompts("a"))
    pinned = pin(make_spec(uri).input, Objects())
    catalog.drop_table("lake.t")
    iceberg(catalog, "t", prompts("b"))
    assert f"Iceberg table {uri} was made again after this job" in refusal(uri, pinned)
    with pytest.raises(InputError, match="was made again since the last job"):
        pin(make_spec(uri, input={"since": "last"}).input, Objects(), lambda: pinned)


def test_changed_rows_of_iceberg_are_no_new_ones(catalog: Any) -> None:
    uri = iceberg(catalog, "t", prompts("a", "b"), prompts("c"))
    table = catalog.load_table("lake.t")
    first = table.snapshots()[0].snapshot_id
    table.delete("id == 'c'")  # its whole file
    assert ids(uri, since=first) == []
    table.delete("id == 'a'")
    assert "changed rows, so what was added since" in refusal(uri, since=first)
    assert "was added since is not known" in refusal(uri, since=12345)


def compact(catalog: Any, name: str) -> None:
    """Rewrite all files into one. The library has no such snapshots, so this one is given its name
    in the table's metadata."""
    from pyiceberg.io.pyarrow import _dataframe_to_data_files

    table = catalog.load_table(name)
    with table.transaction() as change, change.update_snapshot().overwrite() as files:
        for file in _dataframe_to_data_files(table.metadata, table.scan().to_arrow(), table.io):
            files.append_data_file(file)
        for task in table.scan().plan_files():
            files.delete_data_file(task.file)
    metadata = Path(catalog.load_table(name).metadata_location.removeprefix("file://"))
    said = metadata.read_text()
    metadata.write_text(said.replace('"operation":"overwrite"', '"operation":"replace"'))


def test_new_rows_of_iceberg_that_were_compacted_and_deleted_are_refused(catalog: Any) -> None:
    uri = iceberg(catalog, "t", prompts("a"), prompts("b"), prompts("c"))
    first, _, last = [one.snapshot_id for one in catalog.load_table("lake.t").snapshots()]
    compact(catalog, "lake.t")
    assert ids(uri, since=first) == ["b", "c"]
    catalog.load_table("lake.t").delete("id != ''")
    iceberg(catalog, "t", prompts("d"))
    assert "changed rows, so what was added since" in refusal(uri, since=first)
    assert ids(uri, since=last) == ["d"]


def test_expired_and_missing_snapshots_and_tables_of_iceberg_are_refused(catalog: Any) -> None:
    uri = iceberg(catalog, "t", prompts("a"))
    assert refusal(uri, snapshot=12345) == (
        f"snapshot 12345 of Iceberg table {uri} is not there: it has expired, or never was; name "
        "another one, or submit a new job"
    )
    assert refusal("iceberg://nights/lake.none") == (
        "iceberg://nights/lake.none is not there: its catalog has no such table"
    )
    catalog.create_table("lake.empty", schema=pa.schema([("prompt", pa.string())]))
    assert "has no snapshot: nobody has written to it" in refusal("iceberg://nights/lake.empty")
    for file in Path(catalog.load_table("lake.t").location().removeprefix("file://")).rglob(
        "*.parquet"
    ):
        file.unlink()
    assert "1 of its 1 files are gone" in refusal(uri)


def test_a_file_outside_of_an_iceberg_table_is_refused(catalog: Any, tmp_path: Path) -> None:
    uri = iceberg(catalog, "t", prompts("a"))
    table = catalog.load_table("lake.t")
    first = table.current_snapshot().snapshot_id
    pq.write_table(pa.Table.from_pylist(prompts("b")), tmp_path / "x.parquet")
    table.add_files([f"file://{tmp_path}/x.parquet"])
    last = table.current_snapshot().snapshot_id
    for pinned in (Snapshot(last), Snapshot(last, first)):
        assert f"file file://{tmp_path}/x.parquet lies outside of" in refusal(uri, pinned)
    with table.transaction() as change:
        change.set_properties({"write.data.path": f"file://{tmp_path}"})
    assert ids(uri) == ["a", "b"]


def test_a_catalog_that_nobody_configured_is_refused(catalog: Any) -> None:
    del catalog
    with pytest.raises(UsageError, match="pyiceberg cannot open catalog other"):
        rows("iceberg://other/lake.t")


def test_renamed_columns_of_iceberg_are_refused(catalog: Any) -> None:
    from pyiceberg.types import StringType

    uri = iceberg(catalog, "t", prompts("a"))
    with catalog.load_table("lake.t").update_schema() as update:
        update.add_column("topic", StringType())
    catalog.load_table("lake.t").append(pa.table({"id": ["b"], "prompt": ["x"], "topic": ["y"]}))
    assert ids(uri, tag_column="topic") == ["a", "b"]
    with catalog.load_table("lake.t").update_schema() as update:
        update.rename_column("prompt", "question")
    assert ids(uri) == ["a", "b"], "the snapshot has the columns that it was written with"
    catalog.load_table("lake.t").append(pa.table({"id": ["c"], "question": ["x"], "topic": ["y"]}))
    assert refusal(uri, prompt_column="question").startswith(
        f"column `question` of Iceberg table {uri} was renamed"
    )


@pytest.mark.parametrize("writes", [False, True])
def test_columns_of_iceberg_that_were_renamed_and_back_are_refused(
    catalog: Any, writes: bool
) -> None:
    """If a file has the other name: by then the schema has its first number again."""

    def rename(name: str, other: str) -> None:
        with catalog.load_table("lake.t").update_schema() as update:
            update.rename_column(name, other)

    uri = iceberg(catalog, "t", prompts("a"))
    rename("prompt", "question")
    if writes:
        catalog.load_table("lake.t").append(pa.table({"id": ["b"], "question": ["x"]}))
    rename("question", "prompt")
    catalog.load_table("lake.t").append(pa.Table.from_pylist(prompts("c")))
    if writes:
        assert "of Iceberg table iceberg://nights/lake.t was renamed" in refusal(uri)
    else:
        assert ids(uri) == ["a", "c"]


def test_columns_of_iceberg_that_were_added_are_kept(catalog: Any) -> None:
    kinds = {
        "topic": pa.string(),
        "bytes": pa.binary(),
        "words": pa.list_(pa.string()),
        "pair": pa.struct({"a": pa.string(), "b": pa.int64()}),
        "map": pa.map_(pa.string(), pa.binary()),
    }
    uri = iceberg(catalog, "t", prompts("a"))
    values = {"topic": "x", "bytes": b"y", "words": ["z"], "pair": {"a": "u", "b": 1}, "map": []}
    later = pa.Table.from_pylist(
        [{**prompts("b")[0], **values}],
        pa.schema({"id": pa.string(), "prompt": pa.string(), **kinds}),
    )
    with catalog.load_table("lake.t").update_schema() as update:
        update.union_by_name(later.schema)
    catalog.load_table("lake.t").append(later)
    source = open_source(make_spec(uri).input, Objects())
    schema = kept_schema(source, tuple(kinds))
    kept = pa.Table.from_batches(source.kept_rows(schema), schema).to_pylist()
    assert sorted(kept, key=str) == sorted([values, dict.fromkeys(kinds)], key=str)


def test_a_partitioned_table_of_iceberg_is_read(catalog: Any) -> None:
    uri = iceberg(catalog, "t", [{"id": "a", "prompt": "x", "topic": "code"}])
    with catalog.load_table("lake.t").update_spec() as update:
        update.add_identity("topic")
    more = [
        {"id": "b", "prompt": "y", "topic": "code"},
        {"id": "c", "prompt": "z", "topic": "lisp"},
    ]
    catalog.load_table("lake.t").append(pa.Table.from_pylist(more))
    assert ids(uri, tag_column="topic") == ["a", "b", "c"]
