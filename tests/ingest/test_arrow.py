"""Arrow files and streams: every layout of text, any place to read on from, and hostile bytes."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from ingest.making import make_spec
from ingest.opening import opened, refusal, rows

from specbatch.jobs.cli.checks import check_input_here
from specbatch.pipeline.inputs import columnar
from specbatch.pipeline.inputs.columnar import ColumnarSource
from specbatch.pipeline.inputs.columnar_child import sizes_of
from specbatch.pipeline.inputs.kept import kept_schema
from specbatch.pipeline.inputs.planner import plan
from specbatch.pipeline.inputs.sources import open_source
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.errors import InputError

pytestmark = pytest.mark.pipeline  # starts processes

KINDS = ["file", "stream"]


def prompts(path: Path, **values: Any) -> list[Any]:
    source = opened(path, **values)
    source.check()
    return [row.prompt for row in rows(source)]


def write(
    path: Path, table: pa.Table | dict[str, Any], kind: str = "file", rows: int = 10, **options: Any
) -> Path:
    made = table if isinstance(table, pa.Table) else pa.table(table)
    new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with new(str(path), made.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(made, max_chunksize=rows)
    return path


TEXTS = [f"prompt {i}" for i in range(25)]


# --- what a file may be -------------------------------------------------------------------------
@pytest.mark.parametrize("suffix", ["arrow", "feather", "ipc", "none"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_files_and_streams_are_read_compressed_or_not(
    tmp_path: Path, suffix: str, kind: str, compression: str | None
) -> None:
    path = tmp_path / f"a.{suffix}"
    write(path, {"prompt": TEXTS, "id": TEXTS}, kind, compression=compression)
    named = {"format": "arrow"} if suffix == "none" and kind == "stream" else {}
    source = opened(path, **named)
    assert source.format == "arrow"
    assert [(row.id, row.prompt) for row in rows(source)] == [(t, t) for t in TEXTS]
    if not named:
        check_input_here(make_spec(path).input)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "layout",
    [
        pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(),
        pa.binary_view(), pa.dictionary(pa.int8(), pa.string()),
        pa.dictionary(pa.uint64(), pa.large_string()), pa.run_end_encoded(pa.int32(), pa.string()),
    ],
    ids=str,
)  # fmt: skip
def test_text_of_every_layout_is_text(tmp_path: Path, kind: str, layout: pa.DataType) -> None:
    texts: list[str | None] = [f"long enough for a view {i // 3}" for i in range(25)]
    texts[4] = None
    if pa.types.is_run_end_encoded(layout):
        column = pa.array(texts).cast(pa.string())
        column = pa.compute.run_end_encode(column, run_end_type=pa.int32())
    else:
        column = pa.array(texts, pa.string()).cast(layout)
    path = write(tmp_path / "a.arrow", {"prompt": column}, kind)
    assert prompts(path) == texts


@pytest.mark.parametrize("kind", KINDS)
def test_messages_and_token_ids_are_read(tmp_path: Path, kind: str) -> None:
    chats = [[{"role": "user", "content": t}] for t in TEXTS]
    ids = [[i, i + 1] for i in range(25)]
    path = write(tmp_path / "a.arrow", {"prompt": chats, "ids": ids, "s": list(range(25))}, kind)
    assert prompts(path) == chats
    assert prompts(path, prompt_column="ids", seed_column="s") == ids
    assert rows(opened(path, seed_column="s"))[7].seed == 7


def test_dictionaries_that_grow_or_change_are_followed(tmp_path: Path) -> None:
    """Of a stream, also when it is read from the middle on."""
    path = tmp_path / "a.arrow"
    kind = pa.dictionary(pa.int32(), pa.string())
    expected = [[f"a{i}" for i in range(n)] for n in (3, 5, 2)]
    parts = [pa.array(words).dictionary_encode().cast(kind) for words in expected]
    parts.append(pa.array(["new", "new"]).dictionary_encode().cast(kind))
    expected.append(["new", "new"])
    schema = pa.schema({"prompt": kind})
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with pa.ipc.new_stream(str(path), schema, options=options) as writer:
        for part in parts:
            writer.write_batch(pa.RecordBatch.from_arrays([part], schema=schema))
    source = opened(path)
    found = list(source.read())
    assert [[row.prompt for row in batch.rows] for batch in found] == expected
    for number, batch in enumerate(found):
        rest = [word for words in expected[number:] for word in words]
        assert [row.prompt for row in rows(source, batch.position(0))] == rest


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    for kind in KINDS:
        path = write(tmp_path / "a.arrow", {"prompt": pa.array([], pa.string())}, kind)
        assert prompts(path) == []


def test_missing_columns_and_wrong_types_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", {"text": TEXTS, "prompt": [1.5] * 25})
    assert refusal(path).startswith(f"column `prompt` of {path} is double; accepted: text")
    assert "has no column `no`; its columns are text, prompt" in refusal(path, prompt_column="no")
    with pytest.raises(InputError, match="has no column `no`"):
        check_input_here(make_spec(path, input={"prompt_column": "no"}).input)


def test_other_layouts_are_unwrapped(tmp_path: Path) -> None:
    ids = pa.array([bytes(15) + bytes([i]) for i in range(25)], pa.binary(16))
    table = pa.table({"prompt": TEXTS, "u": pa.ExtensionArray.from_storage(pa.uuid(), ids)})
    source = opened(write(tmp_path / "a.arrow", table))
    schema = kept_schema(source, ("u",))
    assert schema.field("u").type == pa.binary(16)
    assert [v for batch in source.kept_rows(schema) for v in batch["u"].to_pylist()] == (
        ids.to_pylist()
    )


# --- reading on -----------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("encoded", [False, True])
def test_reading_on_from_any_row_gives_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, encoded: bool
) -> None:
    monkeypatch.setattr(columnar, "ROWS_PER_BATCH", 4)
    for name in "ab":
        texts = pa.array([f"{name}{i // 2}" for i in range(25)])
        column = texts.dictionary_encode() if encoded else texts
        write(tmp_path / f"{name}.arrow", {"id": TEXTS, "prompt": column, "x": texts}, kind)
    source = opened(tmp_path)
    whole = rows(source)
    assert len(whole) == 50
    seen = 0
    for batch in source.read():
        for index in range(len(batch.rows) + 1):
            position = batch.position(index)
            assert rows(source, position) == whole[seen + index :]
            assert len([i for ids in source.ids_until(position) for i in ids]) == seen + index
        seen += len(batch.rows)


def test_plans_are_the_same_from_any_group_on(tmp_path: Path, make_checker: Any) -> None:
    spec = make_spec(write(tmp_path / "a.arrow", {"prompt": TEXTS, "id": TEXTS}, "stream", 7))
    planned = list(plan(open_source(spec.input, Objects()), make_checker(spec), 4))
    assert len(planned) == 7
    for done in range(1, len(planned)):
        last = planned[done - 1]
        rest = plan(
            open_source(spec.input, Objects()), make_checker(spec), 4,
            last.cursor, last.next_row, last.index + 1,
        )  # fmt: skip
        assert list(rest) == planned[done:]


def test_a_file_that_changed_is_not_read_on(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", {"prompt": TEXTS})
    cursor = next(iter(opened(path).read())).position(1)
    write(path, {"prompt": [*TEXTS, "x"]})
    with pytest.raises(InputError, match="changed since this job began"):
        rows(opened(path), cursor)


# --- bad rows, damage and hostile files -----------------------------------------------------------
@pytest.mark.parametrize("layout", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_text_that_is_not_utf8_spoils_its_row_alone(
    tmp_path: Path, layout: pa.DataType, make_checker: Any
) -> None:
    binary = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
    raw = pa.array([b"good", b"\xff", b"good"], binary.get(layout, pa.binary_view()))
    spec = make_spec(write(tmp_path / "a.arrow", {"prompt": raw.view(layout)}))
    (group,) = plan(open_source(spec.input, Objects()), make_checker(spec), 8)
    assert [row.row_index for row in group.rows] == [0, 2]
    assert [row.code for row in group.rejected] == ["invalid_utf8"]


BAD = pa.array([b"good", b"\xff", b"good"], pa.binary()).view(pa.string())
STRUCTS = pa.StructArray.from_arrays([BAD, pa.array([1, 2, 3])], names=["t", "n"])
OFFSETS = pa.array([0, 1, 2, 3], pa.int32())
NESTED = [
    STRUCTS,
    pa.ListArray.from_arrays(OFFSETS, BAD),
    pa.ListArray.from_arrays(OFFSETS, STRUCTS),
    pa.LargeListArray.from_arrays(OFFSETS.cast(pa.int64()), BAD),
    pa.FixedSizeListArray.from_arrays(BAD, 1),
    pa.ListViewArray.from_arrays(OFFSETS[:3], pa.array([1, 1, 1], pa.int32()), BAD),
    pa.MapArray.from_arrays(OFFSETS, pa.array(["a", "b", "c"]), BAD),
    pa.StructArray.from_arrays([BAD.dictionary_encode()], names=["t"]),
    pa.StructArray.from_arrays([BAD.view(pa.binary()).cast(pa.binary_view()).view(
        pa.string_view())], names=["t"]),
]  # fmt: skip


@pytest.mark.parametrize("column", NESTED, ids=lambda column: str(column.type))
def test_text_within_a_cell_that_is_not_utf8_spoils_its_row_alone(
    tmp_path: Path, column: pa.Array, make_checker: Any
) -> None:
    path = write(tmp_path / "a.arrow", {"x": column})
    spec = make_spec(path, input={"template": "{x}"})
    (group,) = plan(open_source(spec.input, Objects()), make_checker(spec), 8)
    assert [row.row_index for row in group.rows] == [0, 2]
    assert [row.code for row in group.rejected] == ["invalid_utf8"]


def test_offsets_within_a_cell_are_still_checked(tmp_path: Path) -> None:
    texts = pa.array(["a", "b", "c"])
    wrong = pa.ListArray.from_arrays(pa.array([0, 9, 2, 3], pa.int32()), texts)
    table = pa.table({"x": pa.StructArray.from_arrays([wrong], names=["l"])})
    path = write(tmp_path / "a.arrow", table)
    with pytest.raises(InputError, match="is damaged; write the file again"):
        rows(opened(path, template="{x}"))


def test_an_id_that_python_does_not_have_is_no_id(tmp_path: Path, make_checker: Any) -> None:
    """Also when a job resumes and reads the ids before that place alone."""
    days = pa.array([1, 2_932_897, 2, 1, 2_932_897, 3], pa.date32())
    spec = make_spec(write(tmp_path / "a.arrow", {"prompt": TEXTS[:6], "id": days}))
    planned = list(plan(open_source(spec.input, Objects()), make_checker(spec), 1))
    rejected = [row for group in planned for row in group.rejected]
    assert [(row.row_index, row.row_id, row.code) for row in rejected] == [
        (1, None, "unreadable"), (3, "1970-01-02", "duplicate_id"), (4, None, "unreadable"),
    ]  # fmt: skip
    last = planned[1]
    again = plan(open_source(spec.input, Objects()), make_checker(spec), 1, last.cursor, 3, 2)
    assert list(again) == planned[2:]


LONG = "x" * 1000
ONE = pa.array(["a", LONG, "b", "c"])
FOUR = pa.array([0, 1, 2, 3, 4], pa.int32())
CODES = pa.array([0, 0, 0, 0], pa.int8())
NUMBERS = pa.array([1, 2, 3, 4])
WIDE = [
    pa.ListArray.from_arrays(FOUR, ONE),
    pa.ListViewArray.from_arrays(FOUR[:4], pa.array([1] * 4, pa.int32()), ONE),
    pa.LargeListViewArray.from_arrays(
        FOUR[:4].cast(pa.int64()), pa.array([1] * 4, pa.int64()), ONE),
    pa.MapArray.from_arrays(FOUR, NUMBERS, ONE),
    pa.MapArray.from_arrays(FOUR, ONE, NUMBERS),
    pa.UnionArray.from_sparse(CODES, [ONE, NUMBERS]),
    pa.UnionArray.from_dense(CODES, FOUR[:4], [ONE, NUMBERS]),
    pa.StructArray.from_arrays([pa.compute.run_end_encode(ONE)], names=["r"]),
    pa.StructArray.from_arrays([ONE.dictionary_encode()], names=["d"]),
]  # fmt: skip


@pytest.mark.parametrize("column", WIDE, ids=lambda column: str(column.type))
def test_cells_of_every_type_have_a_size(column: pa.Array) -> None:
    for first in range(4):
        sizes = sizes_of(column.slice(first)).tolist()
        assert [size > 900 for size in sizes] == [False, True, False, False][first:]
    assert sizes_of(column)[1] < 1100


def test_views_of_the_same_values_count_each_time() -> None:
    counts = pa.array([2, 4, 0], pa.int32())
    column = pa.ListViewArray.from_arrays(pa.array([1, 0, 3], pa.int32()), counts, ONE)
    assert sizes_of(column).tolist() == [1001 + 16, 1003 + 32, 0]
    assert sizes_of(pa.array([bytes(500), None], pa.binary(500))).tolist() == [500, 500]
    assert sizes_of(pa.array([1, 2], pa.int8())).tolist() == [8, 8]


@pytest.mark.parametrize("column", WIDE, ids=lambda column: str(column.type))
def test_a_giant_cell_of_any_type_is_a_bad_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: pa.Array
) -> None:
    monkeypatch.setattr(columnar, "MAX_ROW_BYTES", 900)
    found = rows(opened(write(tmp_path / "a.arrow", {"x": column}), template="{x}"))
    assert [row.problem and row.problem[0] for row in found] == [None, "too_long", None, None]


def test_a_giant_cell_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar, "MAX_ROW_BYTES", 50)
    path = write(tmp_path / "a.arrow", {"prompt": ["a", "x" * 51, "b"], "id": ["1", "2", "3"]})
    found = rows(opened(path))
    assert [(row.id, row.prompt) for row in found] == [("1", "a"), ("2", None), ("3", "b")]
    assert found[1].problem == (
        "too_long",
        "column `prompt` has 51 bytes here; at most 50 are read",
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [0, 5, 8, 30, -1, -8, -200])
def test_a_truncated_file_is_named(tmp_path: Path, kind: str, keep: int) -> None:
    path = write(tmp_path / "a.arrow", {"prompt": TEXTS}, kind)
    path.write_bytes(path.read_bytes()[:keep])
    assert refusal(path) == f"{path} is truncated or not Arrow; write it again, or leave it out"


def test_feather_version_1_is_refused_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "a.feather"
    path.write_bytes(b"FEA1" + bytes(60) + b"FEA1")
    assert refusal(path) == (
        f"{path} cannot be read: it is Feather version 1; write it again as version 2"
    )
    with pytest.raises(InputError) as caught:
        check_input_here(make_spec(path).input)
    assert str(caught.value) == refusal(path)


def test_a_body_that_expands_beyond_the_memory_is_unreadable_and_the_rest_is_read(
    tmp_path: Path,
) -> None:
    giant = pa.array(["x" * (4 << 20)] * 100)
    parts = [pa.array(["before"] * 3), giant, pa.array(["after"] * 2)]
    path = write(tmp_path / "a.arrow", pa.table({"prompt": pa.chunked_array(parts)}),
                 rows=1000, compression="zstd")  # fmt: skip
    assert path.stat().st_size < 1 << 20
    source = opened(path, memory_bytes=200 << 20)
    found = rows(source)
    assert [row.prompt for row in found[:3] + found[-2:]] == ["before"] * 3 + ["after"] * 2
    assert len(found) == 105
    assert {row.problem[0] for row in found[3:-2] if row.problem} == {"unreadable"}
    assert all(row.problem for row in found[3:-2])
    assert "smaller record batches" in str(found[3].problem)


def hostile(data: bytes, noise: random.Random) -> Iterator[bytes]:
    """The file with bytes changed: anywhere, and where its numbers are."""
    for _ in range(60):
        at = noise.randrange(len(data))
        yield data[:at] + noise.randbytes(noise.randrange(1, 9)) + data[at + 8 :]
    for _ in range(60):
        at = noise.randrange(0, len(data) - 8, 4)
        number = noise.choice([-1, 2**31 - 1, 2**62, 0, -(2**63), 2**33])
        yield data[:at] + struct.pack("<q", number) + data[at + 8 :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [pa.string(), pa.dictionary(pa.int8(), pa.string())], ids=str)
def test_hostile_bytes_end_in_rows_or_in_a_sentence(
    tmp_path: Path, kind: str, layout: pa.DataType
) -> None:
    """Whatever the file says: no crash of this process, no other error, no endless reading."""
    whole = write(
        tmp_path / "whole.arrow",
        {"prompt": pa.array(TEXTS).cast(layout), "ids": [[i] for i in range(25)]}, kind,
    ).read_bytes()  # fmt: skip
    noise, reasons = random.Random(7), []
    for number, data in enumerate(hostile(whole, noise)):
        path = tmp_path / f"{number}.arrow"
        path.write_bytes(data)
        try:
            source = opened(path, memory_bytes=100 << 20)
            assert isinstance(source, ColumnarSource)
            source.check()
            assert sum(1 for _ in rows(source)) <= 25 + columnar.MOST_UNREADABLE
        except InputError as error:
            reasons.append(str(error))
    assert len(reasons) > 20
    assert all(str(tmp_path) in reason for reason in reasons)


# --- columns that are kept ------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_kept_columns_have_their_types(tmp_path: Path, kind: str) -> None:
    table = pa.table(
        {
            "id": TEXTS, "prompt": TEXTS, "view": pa.array(TEXTS, pa.string_view()),
            "n": pa.array(range(25), pa.uint16()), "list": [[i] for i in range(25)],
            "code": pa.array(["a", "b", None, "a", "b"] * 5).dictionary_encode(),
        }
    )  # fmt: skip
    source = opened(write(tmp_path / "a.arrow", table, kind))
    schema = kept_schema(source, "all")
    assert schema.names == ["prompt", "view", "n", "list", "code"]
    assert schema.field("view").type == pa.large_string()
    assert schema.field("n").type == pa.uint16()
    found = pa.Table.from_batches(source.kept_rows(schema))
    assert found.to_pylist() == table.select(schema.names).to_pylist()


def test_a_type_that_the_output_cannot_have_is_refused(tmp_path: Path) -> None:
    union = pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [pa.array([1, 2])] * 2)
    source = opened(write(tmp_path / "a.arrow", {"prompt": ["a", "b"], "u": union}))
    with pytest.raises(InputError, match=r"column `u` cannot be kept: it is .*union.*leave it out"):
        kept_schema(source, "all")
    assert kept_schema(source, ("prompt",)).names == ["prompt"]
