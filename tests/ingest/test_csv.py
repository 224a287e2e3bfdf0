"""CSV and TSV: the header, rows as text, bad rows, and reading on from a byte offset."""

from __future__ import annotations

import csv
import gzip
import io
import random
from pathlib import Path
from typing import Any

import pytest
from ingest.making import make_spec
from ingest.opening import opened, refusal, rows
from pydantic import ValidationError

from specbatch.jobs.cli.checks import check_input_here
from specbatch.pipeline.inputs import delimited
from specbatch.pipeline.inputs.delimited import CsvSource
from specbatch.pipeline.inputs.kept import kept_schema
from specbatch.pipeline.inputs.planner import plan
from specbatch.pipeline.inputs.sources import open_source
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.errors import InputError
from specbatch.schemas.records import PromptRow
from specbatch.schemas.spec import InputSpec


def prompts(path: Path, **values: Any) -> list[Any]:
    return [row.prompt for row in rows(opened(path, **values))]


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


# --- what a file may be -------------------------------------------------------------------------
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_cells_are_text_whatever_they_hold(tmp_path: Path, end: str) -> None:
    text = end.join(["id,prompt,n", '1,"a, b",7', '2,"say ""hi""",', '3,"two', 'lines",x', "", ""])
    path = write(tmp_path / "a.csv", text)
    source = opened(path)
    source.check()
    assert isinstance(source, CsvSource)
    assert source.has_ids
    found = [(row.id, row.prompt) for row in rows(source)]
    assert found == [("1", "a, b"), ("2", 'say "hi"'), ("3", f"two{end}lines")]


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [
        ("a.csv", None, "id,prompt\n1,x\ty\n"),
        ("a.tsv", None, "id\tprompt\n1\tx\ty\n".replace("x\ty", '"x\ty"')),
        ("a.csv", ";", "id;prompt\n1;x\ty\n"),
        ("a.tsv", "|", "id|prompt\n1|x\ty\n"),
        ("a.csv", r"\t", 'id\tprompt\n1\t"x\ty"\n'),
    ],
)
def test_the_suffix_or_the_spec_says_what_divides_cells(
    tmp_path: Path, name: str, given: str | None, text: str
) -> None:
    path = write(tmp_path / name, text)
    assert prompts(path, delimiter=given) == ["x\ty"]
    packed = write(tmp_path / f"{name}.gz", gzip.compress(text.encode()))
    assert prompts(packed, delimiter=given) == ["x\ty"]


def test_a_format_can_be_named_where_the_suffix_says_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "prompt\nx\n")
    assert "if it is one of these or CSV, set input.format" in refusal(path)
    assert prompts(path, format="csv") == ["x"]


@pytest.mark.parametrize("wrong", ["", ",,", '"', "\n", "é", "\0"])
def test_a_delimiter_is_one_character(wrong: str) -> None:
    with pytest.raises(ValidationError, match="one ASCII character"):
        InputSpec(uri="a.csv", delimiter=wrong)


def test_a_delimiter_is_for_csv_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"prompt": "x"}\n')
    assert "input.delimiter is for CSV files" in refusal(path, delimiter=";")


def test_a_byte_order_mark_is_not_part_of_a_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"\xef\xbb\xbfprompt\nx\n")
    assert prompts(path) == ["x"]


def test_a_folder_is_read_in_order_and_columns_may_be_in_any(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "prompt,id\nx,1\n")
    write(tmp_path / "b.tsv", "id\tprompt\n2\ty\n")
    write(tmp_path / "c.csv.gz", gzip.compress(b"other,id,prompt\n,3,z\n"))
    assert [(r.id, r.prompt) for r in rows(opened(tmp_path))] == [
        ("1", "x"),
        ("2", "y"),
        ("3", "z"),
    ]
    write(tmp_path / "d.arrow", b"")
    assert "holds Arrow and CSV files; set input.format to choose" in refusal(tmp_path)
    assert len(rows(opened(tmp_path, format="csv"))) == 3


def test_seeds_tags_and_sampling_values_come_from_cells(tmp_path: Path) -> None:
    text = 'prompt,tag,s,own\nx,t,12,"{""top_k"": 3}"\ny,,,\nz,t,-1,\n'
    source = opened(write(tmp_path / "a.csv", text), seed_column="s", sampling_column="own")
    found = [(row.tag, row.seed, row.sampling) for row in rows(source)]
    assert found == [("t", 12, '{"top_k": 3}'), (None, None, None), ("t", "-1", None)]


def test_messages_are_json_text(tmp_path: Path, make_checker: Any) -> None:
    path = write(tmp_path / "a.csv", 'prompt\n"[{""role"": ""user"", ""content"": ""hi""}]"\n')
    spec = make_spec(path, input={"prompt_kind": "messages"})
    (group,) = plan(open_source(spec.input, Objects()), make_checker(spec), 8)
    assert len(group.rows) == 1
    assert "cells of CSV files are text" in refusal(path, prompt_kind="token_ids")


# --- what is refused at once ----------------------------------------------------------------------
def test_a_file_that_is_not_what_was_asked_for_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for text, words in {
        "": f"{path} is empty: a CSV file begins with the names of its columns",
        "text,k\nx,1\n": f"{path} has no column `prompt`; its columns are text, k",
        "text;k\nx;1\n": "its columns are text;k; is input.delimiter right?",
        "prompt,prompt\nx,y\n": "has several columns `prompt`; rename all but one",
        '"prompt\nx\n': f"{path} does not begin with a header: the row is not CSV: "
        "a quote is not closed, in a row of 2 lines",
        "prompt\rx\r": "does not begin with a header: the row is not CSV: a line ends in CR alone",
        "prompt,a\nx\ny\n": f"none of the first 2 rows of {path} can be read: "
        "the row has 1 cell, and the header has 2",
    }.items():
        write(path, text)
        assert words in refusal(path)
        with pytest.raises(InputError) as caught:
            check_input_here(make_spec(path).input)
        assert words in str(caught.value)
    write(path, "prompt\nä\n".encode("utf-16"))
    assert "is not UTF-8" in refusal(path)


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    text = gzip.compress(b"prompt\n" + random.Random(5).randbytes(5000).hex().encode())
    for broken in (text[:-30], text[:3000], b"prompt\nx\n"):
        path = write(tmp_path / "a.csv.gz", broken)
        with pytest.raises(InputError, match=rf"{path} is truncated or not gzip"):
            rows(opened(path))


@pytest.mark.parametrize("text", ["prompt\n", "prompt\n\n\n", "prompt"])
def test_a_header_alone_is_an_input_without_rows(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "a.csv", text)
    assert prompts(path) == []
    with pytest.raises(InputError, match="has no rows"):
        check_input_here(make_spec(path).input)


# --- bad rows -------------------------------------------------------------------------------------
def test_a_bad_row_is_quarantined_by_its_number_and_the_others_are_read(
    tmp_path: Path, make_checker: Any
) -> None:
    bad = [
        b'1,"a"b', b"2,x,y", b"3", b"4,\xff", b"good,x", b'6,5" pipe', b'7,"',
        b'8,"closed here', b'by mistake"', b"last,y",
    ]  # fmt: skip
    path = write(tmp_path / "a.csv", b"id,prompt\n" + b"\n".join(bad))
    spec = make_spec(path)
    (group,) = plan(open_source(spec.input, Objects()), make_checker(spec), 64)
    assert [row.row_id for row in group.rows] == ["good", "6", "last"]
    found = {row.row_index: (row.code, row.reason) for row in group.rejected}
    assert found == {
        0: ("bad_csv", "the row is not CSV: ',' expected after '\"'"),
        1: ("bad_csv", "the row has 3 cells, and the header has 2"),
        2: ("bad_csv", "the row has 1 cell, and the header has 2"),
        3: ("invalid_utf8", "the prompt is not valid UTF-8"),
        6: ("bad_csv", "the row is not CSV: ',' expected after '\"', in a row of 2 lines"),
        7: ("bad_csv", "the row has 1 cell, and the header has 2"),
    }


def test_a_quote_that_is_never_closed_takes_the_rest_and_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'prompt,a\nx,1\n"y,2\n' + "z,3\n" * 50)
    (good, bad) = rows(opened(path))
    assert good.prompt == "x"
    assert bad.problem == (
        "bad_csv", "the row is not CSV: a quote is not closed, in a row of 51 lines"
    )  # fmt: skip


GIANT = {
    "line": ('"%s"', 1),
    "unquoted": ("%s", 1),
    "lines": ('"%s"', 12),
    "quotes": ('"%s ""or"", and"', 9),
    "literal": ('5" %s', 1),
    "cells": ('a,"b\nc",%s', 1),
}


@pytest.mark.parametrize("kind", GIANT)
def test_a_row_that_is_too_long_is_passed_by_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(delimited, "MAX_RECORD_BYTES", 60)
    monkeypatch.setattr(delimited, "_PASSED_BY_BYTES", 7)
    pattern, lines = GIANT[kind]
    cell = pattern % "\n".join(["x" * (100 // lines), *["y, z" * 5] * (lines - 1)])
    path = write(tmp_path / "a.csv", f"prompt,id\nbefore,1\n{cell},2\nafter,3\n")
    source = opened(path)
    found = rows(source)
    assert [row.prompt for row in found] == ["before", None, "after"]
    assert found[1].problem == (
        "too_long", f"the row has {len(cell) + 3} bytes; at most 60 are read"
    )  # fmt: skip
    (batch,) = source.read()
    assert [row.prompt for row in rows(source, batch.position(2))] == ["after"]


@pytest.mark.parametrize("kind", GIANT)
def test_a_row_that_is_too_long_is_read_forward_only(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A step back in a gzip file would decompress it from its first byte."""
    monkeypatch.setattr(delimited, "MAX_RECORD_BYTES", 60)
    monkeypatch.setattr(delimited, "_PASSED_BY_BYTES", 7)
    pattern, lines = GIANT[kind]
    cell = pattern % "\n".join(["x" * (100 // lines), *["y, z" * 5] * (lines - 1)])
    found = list(delimited.records(ForwardOnly(f"a\n{cell}\nb\n{cell}\nc\n".encode()), ","))
    assert [one.cells for one in found[::2]] == [["a"], ["b"], ["c"]]
    assert [one.cells[0] for one in found[1::2]] == ["too_long", "too_long"]


class ForwardOnly(io.BytesIO):
    def seek(self, offset: int, whence: int = 0) -> int:
        raise AssertionError(f"a step to {offset}, {whence}")


def test_cells_may_be_longer_than_the_csv_module_allows_by_itself(tmp_path: Path) -> None:
    csv.field_size_limit(131_072)
    path = write(tmp_path / "a.csv", f"prompt\n{'x' * 1_000_000}\n")
    assert prompts(path) == ["x" * 1_000_000]


# --- positions ------------------------------------------------------------------------------------
def many(path: Path, packed: bool = False) -> Path:
    """Rows of every kind, in two files."""
    path.mkdir()
    noise = random.Random(11)
    kinds = ["{i},p{i}", '{i},"p\n{i}"', '{i},"p ""{i}"""', "{i}", '{i},"p"{i}', "", "{i},\udcff"]
    for name in "ab":
        lines = [noise.choice(kinds).format(i=f"{name}{i}") for i in range(70)]
        text = "\n".join(["id,prompt", *lines, "last" + name + ",p"])
        data = text.encode("utf-8", "surrogateescape")
        write(
            path / f"{name}.csv{'.gz' if packed else ''}", gzip.compress(data) if packed else data
        )
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_reading_on_from_any_row_gives_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    monkeypatch.setattr(delimited, "ROWS_PER_BATCH", 9)
    source = opened(many(tmp_path / "in", packed))
    whole = rows(source)
    assert len(whole) > 100
    seen = 0
    for batch in source.read():
        for index in range(0, len(batch.rows) + 1, 4):
            position = batch.position(index)
            assert rows(source, position) == whole[seen + index :]
            ids = [one for part in source.ids_until(position) for one in part]
            assert len(ids) == seen + index
        seen += len(batch.rows)


def test_plans_are_the_same_from_any_group_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_checker: Any
) -> None:
    monkeypatch.setattr(delimited, "ROWS_PER_BATCH", 9)
    spec = make_spec(many(tmp_path / "in"))
    planned = list(plan(open_source(spec.input, Objects()), make_checker(spec), 5))
    for done in range(1, len(planned)):
        last = planned[done - 1]
        rest = plan(
            open_source(spec.input, Objects()), make_checker(spec), 5,
            last.cursor, last.next_row, last.index + bool(last.rows),
        )  # fmt: skip
        assert list(rest) == planned[done:]


def test_a_file_that_changed_is_not_read_on(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "prompt\nx\ny\n")
    (batch,) = opened(path).read()
    cursor = batch.position(1)
    assert [row.prompt for row in rows(opened(path), cursor)] == ["y"]
    write(path, "prompt\nx\nyy\n")
    with pytest.raises(InputError, match="changed since this job began"):
        rows(opened(path), cursor)


def test_a_file_written_to_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delimited, "ROWS_PER_BATCH", 2)
    path = write(tmp_path / "a.csv", "prompt\n" + "x\n" * 20_000)
    batches = opened(path).read()
    next(batches)
    with path.open("a") as file:
        file.write("y\n")
    with pytest.raises(InputError, match="changed since this job began"):
        next(batches)


# --- columns that are kept ------------------------------------------------------------------------
def test_kept_columns_are_text_and_null_for_bad_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"id,prompt,k,e\n1,x,7,\n2,x\n3,x,\xff8,z\n")
    source = opened(path)
    schema = kept_schema(source, ("k", "e"))
    assert [str(kind) for kind in schema.types] == ["string", "string"]
    (batch,) = source.kept_rows(schema)
    assert batch.to_pydict() == {
        "k": ["7", None, "\N{REPLACEMENT CHARACTER}8"],
        "e": ["", None, "z"],
    }
    assert kept_schema(source, "all").names == ["prompt", "k", "e"]
    with pytest.raises(InputError, match="has no column `no`; its columns are id, prompt, k, e"):
        kept_schema(source, ("no",))
    write(tmp_path / "b.csv", "id,prompt\n1,x\n")
    with pytest.raises(InputError, match="columns are prompt, k, e in"):
        kept_schema(opened(tmp_path), "all")


@pytest.mark.parametrize("wanted", ["all", ("k",)])
def test_a_column_that_is_there_twice_cannot_be_kept(tmp_path: Path, wanted: Any) -> None:
    source = opened(write(tmp_path / "a.csv", "prompt,k,k\nx,1,2\n"))
    source.check()
    with pytest.raises(InputError, match="has several columns `k`; rename all but one"):
        kept_schema(source, wanted)


def test_ids_that_repeat_are_found_across_a_resume(tmp_path: Path, make_checker: Any) -> None:
    spec = make_spec(write(tmp_path / "a.csv", "id,prompt\na,x\nb,y\na,z\n,w\n"))
    first, *_ = plan(open_source(spec.input, Objects()), make_checker(spec), 1)
    rest = list(plan(open_source(spec.input, Objects()), make_checker(spec), 8, first.cursor, 1, 1))
    found: list[PromptRow] = [row for group in rest for row in group.rows]
    assert [row.row_id for row in found] == ["b", "3"]
    assert [row.code for group in rest for row in group.rejected] == ["duplicate_id"]
