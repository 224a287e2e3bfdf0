"""Columns of the input in the output: by row, with their types, and one batch in memory."""

from __future__ import annotations

import decimal
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ingest.making import completion

from specbatch.pipeline.inputs.column_types import plainly
from specbatch.pipeline.inputs.kept import kept_schema
from specbatch.pipeline.inputs.sources import open_source
from specbatch.pipeline.outputs.outputs import OutputWriter, read_output
from specbatch.pipeline.outputs.parts import Kept
from specbatch.pipeline.outputs.rows import read_rows
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.arrow import OUTPUT
from specbatch.schemas.errors import InputError, OutputError
from specbatch.schemas.records import RejectedRow
from specbatch.schemas.spec import InputSpec, KeptColumns, OutputFormat
from support.peak_memory import told_peaks

ROWS = 23
TABLE = pa.table(
    {
        "id": pa.array([f"r{i}" for i in range(ROWS)]),
        "prompt": pa.array([f"p{i}" for i in range(ROWS)]),
        "label": pa.array([None if i % 5 == 0 else i for i in range(ROWS)], pa.uint16()),
        "price": pa.array([decimal.Decimal(i) / 4 for i in range(ROWS)], pa.decimal128(9, 2)),
        "day": pa.array([date(2026, 1, 1 + i) for i in range(ROWS)]),
        "at": pa.array(
            [datetime(2026, 1, 1, i, tzinfo=UTC) for i in range(ROWS)], pa.timestamp("us", "UTC")
        ),
        "kind": pa.array(["a" if i % 2 else "b" for i in range(ROWS)]).dictionary_encode(),
        "blob": pa.array([bytes([i, 255]) for i in range(ROWS)], pa.large_binary()),
        "nested": pa.array([{"x": [i], "y": None} for i in range(ROWS)],
                           pa.struct({"x": pa.list_(pa.int8()), "y": pa.string()})),
        "map": pa.array([[("k", i)] for i in range(ROWS)], pa.map_(pa.string(), pa.int64())),
        "none": pa.nulls(ROWS),
    }
)  # fmt: skip
KEPT = Path(__file__).with_name("kept_memory.py")
OTHERS = [name for name in TABLE.column_names if name != "id"]
REJECTED = [RejectedRow(row, None, "empty", "nothing") for row in (3, 22)]
COMPLETIONS = [completion(row, sample) for row in range(22) if row != 3 for sample in (0, 1)]


def parquet(folder: Path) -> InputSpec:
    """Three files with row groups of four rows."""
    folder.mkdir()
    for number, (first, rows) in enumerate([(0, 10), (10, 1), (11, 12)]):
        part = TABLE.slice(first, rows)
        pq.write_table(part, folder / f"{number}.parquet", row_group_size=4)
    return InputSpec(uri=str(folder))


def jsonl(path: Path, rows: list[Any]) -> InputSpec:
    path.write_bytes(b"\n".join(r if isinstance(r, bytes) else orjson.dumps(r) for r in rows))
    return InputSpec(uri=str(path))


def written(
    spec: InputSpec, to: Path, wanted: KeptColumns, kind: OutputFormat = "parquet"
) -> list[Path]:
    """The parts of an output of five rows each."""
    source = open_source(spec, Objects())
    schema = kept_schema(source, wanted)
    OutputWriter(Objects(), str(to), "job", 5, kind).write(
        COMPLETIONS, REJECTED, kept=Kept(schema, source.kept_rows(schema))
    )
    return sorted((to / "data").iterdir())


@pytest.mark.parametrize("wanted", ["all", ("map", "label"), ("kind",)])
def test_columns_come_by_row_with_their_types(tmp_path: Path, wanted: KeptColumns) -> None:
    names = OTHERS if wanted == "all" else list(wanted)
    parts = written(parquet(tmp_path / "in"), tmp_path / "out", wanted)
    assert len(parts) == 9
    table = pa.concat_tables([pq.read_table(part) for part in parts])
    assert table.column_names == [*OUTPUT.names, *names]
    assert table.num_rows == 2 * 21 + 2
    for name in names:
        assert table.schema.field(name).type == TABLE.schema.field(name).type
    given = TABLE.select(names).take(table["row_index"])
    assert table.select(names).to_pylist() == given.to_pylist()


# --- types -----------------------------------------------------------------------------------
_NUMBERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(),
            pa.uint64(), pa.float32(), pa.float64(), pa.decimal32(5, 2), pa.decimal64(12, 3),
            pa.decimal128(20, 4), pa.decimal256(50, 6)]  # fmt: skip
_TIMES = [pa.date32(), pa.date64(), pa.time32("s"), pa.time32("ms"), pa.time64("us"),
          pa.time64("ns"), *(pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")),
          pa.timestamp("ns", "Europe/Berlin"),
          *(pa.duration(unit) for unit in ("s", "ms", "us", "ns"))]  # fmt: skip
_TEXTS = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(),
          pa.binary_view(), pa.binary(3)]  # fmt: skip
_LISTS = [pa.list_(pa.int32()), pa.large_list(pa.string()), pa.list_(pa.float64(), 2)]


def every_type(rows: range) -> pa.Table:
    """A column of each type that Parquet can hold, every seventh cell null."""

    def column(kind: pa.DataType, cell: Callable[[int], Any]) -> pa.Array:
        return pa.array([None if i % 7 == 3 else cell(i) for i in rows], kind)

    day = 86_400
    columns = {
        "id": pa.array([f"r{i}" for i in rows]),
        "prompt": pa.array([f"p{i}" for i in rows]),
        "null": pa.nulls(len(rows)),
        "bool": column(pa.bool_(), lambda i: i % 2 == 0),
        "half": column(pa.float16(), lambda i: np.float16(i % 100)),
    }
    for kind in _NUMBERS:
        columns[str(kind)] = column(kind, lambda i: i % 100)
    for kind in _TIMES:
        is_of_day = pa.types.is_time(kind)
        ticks = {"[s]": 1, "[ms]": 10**3, "[us]": 10**6, "[ns]": 10**9}
        scale = next((scale for unit, scale in ticks.items() if unit in str(kind)), 1)
        whole = day * 1000 if pa.types.is_date64(kind) else scale
        width = pa.int32() if kind.bit_width == 32 else pa.int64()
        columns[str(kind)] = column(width, lambda i, f=whole, d=is_of_day: (i % day if d else i) * f
                                    ).cast(kind)  # fmt: skip
    for kind in _TEXTS:
        is_bytes = "binary" in str(kind)
        columns[str(kind)] = column(
            kind, lambda i, b=is_bytes: b"%03d" % (i % 1000) if b else f"t{i}"
        )
    for kind in _LISTS:
        text = pa.types.is_large_string(kind.value_type) or pa.types.is_string(kind.value_type)
        columns[str(kind)] = column(kind, lambda i, t=text: [str(i), "x"] if t else [i % 100, 1])
    columns["struct"] = column(
        pa.struct({"a": pa.int64(), "b": pa.list_(pa.string())}), lambda i: {"a": i, "b": [str(i)]}
    )
    columns["map"] = column(pa.map_(pa.string(), pa.int64()), lambda i: [("k", i)])
    columns["dictionary"] = column(pa.string(), lambda i: f"k{i % 5}").dictionary_encode()
    return pa.table(columns)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_every_type_that_parquet_has_comes_back(tmp_path: Path, kind: str) -> None:
    table = every_type(range(ROWS))
    path = tmp_path / f"in.{kind}"
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=10)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=10)
    parts = written(InputSpec(uri=str(path)), tmp_path / "out", "all")
    kept_table = pa.concat_tables([pq.read_table(part) for part in parts])
    names = [name for name in table.column_names if name != "id"]
    pq.write_table(table, whole := pa.BufferOutputStream())
    stored = pq.read_table(pa.BufferReader(whole.getvalue())).schema  # date64 becomes date32
    for name in names:
        kind = plainly(stored.field(name).type)
        assert kept_table.schema.field(name).type == kind, name
    given = table.select(names).to_pylist()
    rows = [given[row] for row in kept_table["row_index"].to_pylist()]
    assert kept_table.select(names).to_pylist() == rows


def test_a_type_that_parquet_lacks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.arrow"
    views = pa.array([[1]], pa.list_view(pa.int8()))
    span = pa.array([(1, 2, 3)], pa.month_day_nano_interval())
    table = pa.table({"prompt": ["a"], "span": span, "views": views})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    source = open_source(InputSpec(uri=str(path)), Objects())
    with pytest.raises(InputError, match="`span` cannot be kept: it is month_day_nano_interval"):
        kept_schema(source, "all")
    with pytest.raises(InputError, match="`views` cannot be kept: it is list_view"):
        kept_schema(source, ("views",))
    assert kept_schema(source, ("prompt",)).names == ["prompt"]


@pytest.mark.pipeline  # starts processes
def test_four_times_the_rows_take_no_more_memory() -> None:
    small, large = told_peaks(KEPT, 80_000)
    assert large - small < 40


@pytest.mark.long
def test_memory_is_flat_over_a_million_rows() -> None:
    small, large = told_peaks(KEPT, 1_000_000)
    assert large - small < 40


def test_json_lines_have_them_as_json_can(tmp_path: Path) -> None:
    parts = written(parquet(tmp_path / "in"), tmp_path / "out", "all", "jsonl")
    rows = [orjson.loads(line) for part in parts for line in part.read_bytes().splitlines()]
    (row,) = (row for row in rows if row["row_index"] == 3)
    assert row["error"] == "empty: nothing"
    assert {name: row[name] for name in OTHERS} == {
        "prompt": "p3", "label": 3, "price": "0.75", "day": "2026-01-04",
        "at": "2026-01-01T03:00:00+00:00", "kind": "a", "blob": "A/8=",
        "nested": {"x": [3], "y": None}, "map": [["k", 3]], "none": None,
    }  # fmt: skip


# What Python, and so JSON, does not have, behind a value that it has: and what becomes of both.
ODD = {
    "day": (pa.array([0, 2_932_897], pa.date32()), ["1970-01-01", None]),
    "never": (pa.array([0, 2**63 - 1], pa.timestamp("us")), ["1970-01-01T00:00:00", None]),
    "twice": (pa.StructArray.from_arrays([pa.array([1, None])] * 2, ["a", "a"]), [None, None]),
    "fine": (
        pa.array([1, 2_001], pa.timestamp("ns")),
        ["1970-01-01T00:00:00", "1970-01-01T00:00:00.000002"],
    ),
    "listed": (
        pa.array([[1_001], None], pa.list_(pa.time64("ns"))),
        [["00:00:00.000001"], None],
    ),
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_what_python_does_not_have_is_null_in_json_and_for_readers(
    tmp_path: Path, kind: OutputFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)  # which has nanoseconds
    columns = {name: cells for name, (cells, _) in ODD.items()}
    path, to = tmp_path / "in.parquet", str(tmp_path / "out")
    pq.write_table(pa.table({"prompt": ["a", "b"], **columns}), path)
    source = open_source(InputSpec(uri=str(path)), Objects())
    schema = kept_schema(source, tuple(ODD))
    manifest = OutputWriter(Objects(), to, "job", kind=kind).write(
        [completion(0), completion(1)], (), kept=Kept(schema, source.kept_rows(schema))
    )
    rows = orjson.loads(orjson.dumps(list(read_rows(Objects(), to, manifest, tuple(ODD)))))
    assert {name: [row[name] for row in rows] for name in ODD} == {
        name: values for name, (_, values) in ODD.items()
    }


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_field_that_is_nested_too_deep_is_null(tmp_path: Path, kind: OutputFormat) -> None:
    rows = [b'{"id":"r0","deep":[1]}', b'{"id":"r1","deep":' + b"[" * 300 + b"]" * 300 + b"}"]
    rows += [orjson.dumps({"id": f"r{i}"}) for i in range(2, ROWS)]
    spec = jsonl(tmp_path / "in.jsonl", list(rows))
    written(spec, tmp_path / "out", ("deep",), kind)
    found = {
        row["row_index"]: row["deep"] for row in read_output(str(tmp_path / "out")).to_pylist()
    }
    assert found == dict.fromkeys(range(1, ROWS)) | {0: [1] if kind == "jsonl" else "[1]"}


def test_an_output_of_json_lines_is_read_with_them(tmp_path: Path) -> None:
    spec, to = parquet(tmp_path / "in"), tmp_path / "out"
    source = open_source(spec, Objects())
    schema = kept_schema(source, ("label", "none"))
    written_output = OutputWriter(Objects(), str(to), "job", 5, "jsonl")
    written_output.write(COMPLETIONS, REJECTED, kept=Kept(schema, source.kept_rows(schema)))
    table = read_output(str(to))
    assert table.column_names == [*OUTPUT.names, "label", "none"]
    assert dict(zip(table["row_index"].to_pylist(), table["label"].to_pylist(), strict=True)) == {
        row: None if row % 5 == 0 else row for row in range(ROWS)
    }
    with pytest.raises(OutputError, match="holds the output of job job now, not of other"):
        read_output(str(to), job_id="other")


def test_fields_of_json_lines_keep_a_type_that_all_rows_have(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"id": f"r{i}", "whole": i, "real": i if i % 2 else i / 2, "big": 2**60 + i, "yes": i > 4,
         "any": [i] if i % 2 else "x", "mixed": i / 3 if i else 2**60}
        for i in range(ROWS)
    ]  # fmt: skip
    rows[3], rows[22] = b"no JSON", {"id": "r22", "late": None}
    spec = jsonl(tmp_path / "in.jsonl", rows)
    table = pa.concat_tables(map(pq.read_table, written(spec, tmp_path / "out", "all")))
    types = {
        "whole": pa.int64(), "real": pa.float64(), "big": pa.int64(), "yes": pa.bool_(),
        "any": pa.string(), "mixed": pa.string(), "late": pa.string(),
    }  # fmt: skip
    assert dict(zip(table.schema.names, table.schema.types, strict=True)).items() >= types.items()
    by_row = {row["row_index"]: row for row in table.to_pylist()}
    assert all(by_row[3][name] is None for name in types)
    assert (by_row[5]["any"], by_row[6]["any"], by_row[5]["real"]) == ("[5]", '"x"', 5.0)
    assert by_row[7]["big"] == 2**60 + 7
    parts = written(spec, tmp_path / "lines", ("any", "mixed"), "jsonl")
    lines = [orjson.loads(line) for part in parts for line in part.read_bytes().splitlines()]
    assert {line["row_index"]: line["any"] for line in lines}[5] == [5]
    assert lines[0]["mixed"] == 2**60


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    source = open_source(parquet(tmp_path / "in"), Objects())
    with pytest.raises(InputError, match="has no column `nowhere`; its columns are id, prompt"):
        kept_schema(source, ("label", "nowhere"))
    with pytest.raises(InputError, match="column `id` of the input cannot be kept"):
        kept_schema(source, ("id",))
    lines = open_source(jsonl(tmp_path / "a.jsonl", [{"text": "x"}]), Objects())
    with pytest.raises(InputError, match="column `text` of the input cannot be kept"):
        kept_schema(lines, "all")
    with pytest.raises(InputError, match=r"no row of .*a\.jsonl has a field `label`"):
        kept_schema(lines, ("label",))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"prompt": ["a"], "label": ["x"]}, "column `label` cannot be kept: it is int64 in "),
        ({"prompt": ["a"], "name": ["x"]}, "columns are prompt, label in "),
    ],
)
def test_files_with_other_columns_are_refused(
    tmp_path: Path, other: dict[str, Any], words: str
) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "label": [1]}), tmp_path / "1.parquet")
    pq.write_table(pa.table(other), tmp_path / "2.parquet")
    with pytest.raises(InputError, match=words):
        kept_schema(open_source(InputSpec(uri=str(tmp_path)), Objects()), "all")


def test_one_batch_is_read_at_a_time_and_no_more_than_needed() -> None:
    read = []

    def batches() -> Iterator[pa.RecordBatch]:
        for first in range(0, 40, 10):
            read.append(first)
            yield pa.RecordBatch.from_pydict({"x": list(range(first, first + 10))})

    kept = Kept(pa.schema({"x": pa.int64()}), batches())
    assert read == []
    assert kept.loaded_for(completion(9)).of([completion(9)]).to_pydict() == {"x": [9]}
    assert read == [0]
    assert kept.loaded_for(completion(25)).of([completion(25)] * 2).to_pydict() == {"x": [25, 25]}
    assert read == [0, 10, 20]
    with pytest.raises(InputError, match="the input ends before row 40"):
        kept.loaded_for(completion(40))


def test_many_samples_of_large_rows_are_written_a_few_at_a_time() -> None:
    large = pa.RecordBatch.from_pydict({"x": ["y" * (4 << 20)] * 2})
    assert Kept(large.schema, iter([large])).loaded_for(completion(0)).rows_at_once in (7, 8)
