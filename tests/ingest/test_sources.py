"""Finding the files, the preflight, damaged files, and reading on after a crash."""

from __future__ import annotations

import gzip
import os
import socket
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ingest.making import make_spec, write_parquet
from ingest.opening import opened, refusal

from specbatch.jobs.cli.checks import check_input_here
from specbatch.pipeline.inputs.contract import RawBatch, RawRow, Source
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.errors import InputError
from specbatch.schemas.records import SourcePosition


def prompts(source: Source, start: SourcePosition | None = None) -> list[Any]:
    return [row.prompt for batch in source.read(start) for row in batch.rows]


def write_lines(path: Path, values: list[Any]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(value) + b"\n" for value in values))
    return path


# --- finding ------------------------------------------------------------------------------------
def test_a_folder_is_read_in_order_of_name(tmp_path: Path) -> None:
    for name in ("b", "a", "sub/c"):
        write_parquet(tmp_path / f"{name}.parquet", {"prompt": [name]})
    (tmp_path / "_SUCCESS").write_text("")
    (tmp_path / ".hidden.parquet").write_text("")
    (tmp_path / "_temporary").mkdir()
    (tmp_path / "_temporary" / "x.parquet").write_text("")
    (tmp_path / "notes.txt").write_text("")
    source = opened(tmp_path)
    source.check()
    assert source.format == "parquet"
    assert prompts(source) == ["a", "b", "sub/c"]


def test_globs_choose_files(tmp_path: Path) -> None:
    for name in ("a1", "a2", "b1", "sub/a3"):
        write_parquet(tmp_path / f"{name}.parquet", {"prompt": [name]})
    assert prompts(opened(tmp_path / "a*.parquet")) == ["a1", "a2"]
    assert prompts(opened(tmp_path / "?1.parquet")) == ["a1", "b1"]
    assert prompts(opened(tmp_path / "[!a]*.parquet")) == ["b1"]
    assert prompts(opened(tmp_path / "**" / "a*.parquet")) == ["a1", "a2", "sub/a3"]


def test_what_is_called_like_a_glob_is_found(tmp_path: Path) -> None:
    for name in ("a[1]", "a1", "b?", "in[1]/c"):
        write_parquet(tmp_path / f"{name}.parquet", {"prompt": [name]})
    assert prompts(opened(tmp_path / "a[1].parquet")) == ["a[1]"]
    assert prompts(opened(tmp_path / "b?.parquet")) == ["b?"]
    assert prompts(opened(tmp_path / "in[1]")) == ["in[1]/c"]
    (tmp_path / "a[1].parquet").unlink()
    assert prompts(opened(tmp_path / "a[1].parquet")) == ["a1"]


# Of the files below: what a glob finds.
GLOBS = {
    "*.parquet": ["a"],
    "**/*.parquet": ["a", "sub/b"],
    "*/*.parquet": ["sub/b"],
    "_*.parquet": ["_tmp"],
    "**/_tmp/*.parquet": ["_tmp/c", "sub/_tmp/e"],
    ".ipynb_checkpoints/*": [".ipynb_checkpoints/a"],
}
FILES = ("a", "_tmp", "sub/b", "_tmp/c", "_tmp/.d", "sub/_tmp/e", ".ipynb_checkpoints/a")


@pytest.mark.parametrize("glob", GLOBS)
def test_a_glob_finds_what_is_hidden_only_by_its_name(tmp_path: Path, glob: str) -> None:
    for name in FILES:
        write_parquet(tmp_path / "_in" / f"{name}.parquet", {"prompt": [name]})
    assert sorted(prompts(opened(tmp_path / "_in" / glob))) == GLOBS[glob]


def close(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Nobody may read a folder any more. Root may read everything, so the system is spoken for."""
    scandir = os.scandir

    def refuse(path: Any = ".") -> Any:
        if Path(path) == folder:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)


@pytest.mark.parametrize("glob", ["", "*/*.parquet", "**/*.parquet", "**/b*.parquet", "s*/b.*"])
def test_a_subfolder_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, glob: str
) -> None:
    """Rather than to leave its rows out; whoever submits says so too."""
    for name in ("a", "in/a", "in/sub/b"):
        write_parquet(tmp_path / f"{name}.parquet", {"prompt": [name]})
    uri = tmp_path / "in" / glob
    assert "in/sub/b" in prompts(opened(uri))
    close(monkeypatch, tmp_path / "in" / "sub")
    said = f"cannot list {tmp_path}/in/sub: permission denied"
    assert refusal(uri) == said
    with pytest.raises(InputError, match=said):
        check_input_here(make_spec(uri).input)


@pytest.mark.parametrize("glob", ["in", "in/*.parquet", "in/**/*.parquet", "in/*/*.parquet"])
def test_folders_that_are_not_meant_need_not_be_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, glob: str
) -> None:
    """One that is hidden, and one that a glob does not look into."""
    sub = "in/a" if glob == "in/*.parquet" else "in/.a"
    for name in ("in/c", "in/b/c", f"{sub}/c"):
        write_parquet(tmp_path / f"{name}.parquet", {"prompt": [name]})
    expected = prompts(opened(tmp_path / glob))
    assert len(expected) == 2 - ("**" not in glob and glob != "in")
    close(monkeypatch, tmp_path / sub)
    assert prompts(opened(tmp_path / glob)) == expected
    check_input_here(make_spec(tmp_path / glob).input)


def test_a_folder_that_names_may_not_be_looked_up_in_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its names may be listed all the same; a glob asks for one of them."""
    write_parquet(tmp_path / "in" / "sub" / "a.parquet", {"prompt": ["a"]})
    exists = Path.exists

    def refuse(path: Path) -> bool:
        if path.parent == tmp_path / "in" / "sub":
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", refuse)
    assert refusal(tmp_path / "in" / "*" / "a.parquet").startswith(
        f"cannot list {tmp_path}/in/sub: permission denied"
    )


def test_linked_files_are_read_and_linked_folders_are_not_entered(tmp_path: Path) -> None:
    for name in ("in/a", "else/b", "else/c"):
        write_parquet(tmp_path / f"{name}.parquet", {"prompt": [name]})
    (tmp_path / "in" / "b.parquet").symlink_to(tmp_path / "else" / "b.parquet")
    (tmp_path / "in" / "gone.parquet").symlink_to(tmp_path / "nowhere")
    (tmp_path / "in" / "sub").symlink_to(tmp_path / "else")
    (tmp_path / "whole").symlink_to(tmp_path / "in")
    for name in ("in", "whole"):
        assert prompts(opened(tmp_path / name)) == ["in/a", "else/b"]


def test_local_uris_need_not_be_tidy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "sub/b"):
        write_parquet(tmp_path / "_in" / f"{name}.parquet", {"prompt": [name]})
    assert prompts(opened(f"{tmp_path}//_in/")) == ["a", "sub/b"]
    assert prompts(opened(f"file://{tmp_path}/_in/a.parquet")) == ["a"]
    monkeypatch.chdir(tmp_path / "_in")
    assert prompts(opened("./")) == ["a", "sub/b"]
    assert prompts(opened("*.parquet")) == ["a"]
    assert prompts(opened("./sub/*")) == ["sub/b"]


def test_the_format_is_seen_in_the_file(tmp_path: Path) -> None:
    table = write_parquet(tmp_path / "no_suffix", {"prompt": ["a"]})
    assert opened(table).format == "parquet"
    assert opened(write_lines(tmp_path / "a.jsonl", [{"prompt": "a"}])).format == "jsonl"
    request = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {}}
    assert opened(write_lines(tmp_path / "b.jsonl", [request])).format == "openai"
    assert opened(write_lines(tmp_path / "c.txt", [{"prompt": "a"}])).format == "jsonl"


def test_inputs_that_are_not_there_are_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no.parquet") == f"input {tmp_path}/no.parquet does not exist"
    assert refusal(tmp_path / "*.parquet") == f"no file matches input {tmp_path}/*.parquet"
    (tmp_path / "x.txt").write_text("a,b")
    assert (
        "holds no *.parquet, *.arrow, *.feather, *.ipc, *.csv, *.tsv or *.jsonl files"
        in refusal(tmp_path)
    )
    assert "holds no *.csv or *.tsv files" in refusal(tmp_path, format="csv")
    assert "neither Parquet nor JSONL" in refusal(tmp_path / "x.txt")
    assert "`ftp://` is not supported" in refusal("ftp://b/x")


def test_what_is_no_file_is_named_for_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    for name, words in {
        "link.jsonl": "is a link to nowhere, which does not exist",
        "pipe.jsonl": "is a named pipe: name a file, which can be read again",
        "socket": "is a socket: name a file, which can be read again",
    }.items():
        assert refusal(tmp_path / name) == f"input {tmp_path / name} {words}"
    assert refusal(tmp_path / "folder") == (
        f"input folder {tmp_path}/folder holds no files, or only hidden ones"
    )
    assert "/dev/null is a device" in refusal("/dev/null")


@pytest.mark.parametrize("name", ["none.jsonl", "blank.jsonl", "none.parquet", "folder"])
def test_who_submits_is_told_of_an_input_without_rows(tmp_path: Path, name: str) -> None:
    (tmp_path / "none.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text("\n \n")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "none.parquet", *(tmp_path / "folder" / f"{i}.parquet" for i in "ab")):
        write_parquet(path, {"prompt": pa.array([], pa.string())})
    spec = make_spec(tmp_path / name).input
    with pytest.raises(InputError, match=f"input {tmp_path / name} has no rows"):
        check_input_here(spec)
    check_input_here(spec, may_be_empty=True)
    assert prompts(opened(tmp_path / name)) == []


def test_a_file_without_rows_may_lie_beside_others(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    write_lines(tmp_path / "b.jsonl", [{"prompt": "b"}])
    check_input_here(make_spec(tmp_path).input)


def test_a_folder_of_both_formats_needs_a_choice(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", {"prompt": ["p"]})
    write_lines(tmp_path / "a.jsonl", [{"prompt": "j"}])
    assert "holds Parquet and JSONL files; set input.format to choose" in refusal(tmp_path)
    assert prompts(opened(tmp_path, format="jsonl")) == ["j"]
    assert prompts(opened(tmp_path, format="parquet")) == ["p"]


@pytest.mark.parametrize("first", ["parquet", "jsonl"])
def test_notes_beside_parquet_or_jsonl_are_passed_over(tmp_path: Path, first: str) -> None:
    (tmp_path / "notes.csv").write_text("note\nx\n")
    (tmp_path / "a.arrow").write_bytes(b"")
    if first == "parquet":
        write_parquet(tmp_path / "p.parquet", {"prompt": ["p"]})
    else:
        write_lines(tmp_path / "p.jsonl", [{"prompt": "p"}])
    source = opened(tmp_path)
    source.check()
    assert (source.format, prompts(source)) == (first, ["p"])


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_a_file_that_is_also_there_compressed_is_not_read_twice(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text('{"prompt": "x"}\n' if name == "a.jsonl" else "prompt\nx\n")
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    for uri in (tmp_path, tmp_path / "a.*"):
        assert f"{path} and {path}.gz seem to be the same file" in refusal(uri)
    assert prompts(opened(path)) == ["x"]


# --- preflight ----------------------------------------------------------------------------------
@pytest.mark.parametrize("keep", [0, 3, 100, -1, -9])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    write_parquet(tmp_path / "a.parquet", {"prompt": ["p"] * 50})
    broken = write_parquet(tmp_path / "b.parquet", {"prompt": ["p"] * 50})
    broken.write_bytes(broken.read_bytes()[:keep])
    assert refusal(tmp_path) == (
        f"{broken} is truncated or not Parquet; write it again, or leave it out"
    )


def test_a_missing_column_names_those_that_exist(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": ["p"], "k": [1]})
    assert refusal(path) == f"{path} has no column `prompt`; its columns are text, k"
    assert "no column `nr`" in refusal(path, prompt_column="text", id_column="nr")


def test_every_file_must_have_the_columns(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", {"prompt": ["p"], "id": ["1"]})
    other = write_parquet(tmp_path / "b.parquet", {"prompt": ["p"]})
    assert f"{other} has no column `id`" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("column", "kind", "words"),
    [
        (pa.array([1.5]), "auto", "is double; accepted: text"),
        (pa.array([["a"]]), "auto", "is list<element: string>; accepted: text"),
        (pa.array([{"role": "a"}]), "auto", "accepted: text"),
        (pa.array([["a"]]), "token_ids", "accepted: token ids (a list of integers)"),
        (pa.array(["a"]), "token_ids", "is string; accepted: token ids"),
        (pa.array([[1]]), "text", "accepted: text (string"),
        (pa.array([[1]]), "messages", "accepted: chat messages"),
    ],
)
def test_a_wrong_column_type_names_what_is_accepted(
    tmp_path: Path, column: pa.Array, kind: str, words: str
) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"prompt": column})
    message = refusal(path, prompt_kind=kind)
    assert message.startswith(f"column `prompt` of {path} is ")
    assert words in message


def test_seed_id_and_tag_columns_are_checked(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"prompt": ["p"], "s": [0.5], "l": [[1]]})
    assert "seeds must be integers" in refusal(path, seed_column="s")
    assert "ids and tags must be strings or numbers" in refusal(path, id_column="l")


def test_jsonl_without_the_field_names_its_fields(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "x", "k": 1}])
    assert (
        refusal(path) == f"{path} has no field `prompt` in its first lines; its fields are text, k"
    )
    path.write_bytes(b"a,b\n1,2\n")
    assert "none of its first lines is a JSON object" in refusal(path)


# --- damage and change --------------------------------------------------------------------------
def test_a_corrupt_row_group_is_named_and_earlier_rows_are_read(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"prompt": [f"prompt {i}" for i in range(30)]}, 10)
    column = pq.read_metadata(path).row_group(1).column(0)
    data = bytearray(path.read_bytes())
    begin = column.dictionary_page_offset or column.data_page_offset
    middle = begin + column.total_compressed_size // 2
    data[middle : middle + 8] = b"\xff" * 8
    path.write_bytes(bytes(data))
    source = opened(path)
    source.check()
    batches = source.read()
    assert [row.prompt for row in next(batches).rows] == [f"prompt {i}" for i in range(10)]
    with pytest.raises(InputError, match=rf"row group 1 of {path} is damaged"):
        next(batches)


def test_an_input_that_changed_is_not_read_on(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"prompt": ["a", "b"]})
    batch = next(iter(opened(path).read()))
    cursor = batch.position(1)
    assert prompts(opened(path), cursor) == ["b"]
    write_parquet(path, {"prompt": ["a", "b", "c"]})
    with pytest.raises(InputError, match=rf"{path} changed since this job began"):
        prompts(opened(path), cursor)
    path.unlink()
    write_parquet(tmp_path / "b.parquet", {"prompt": ["a"]})
    with pytest.raises(InputError, match=rf"{path} is gone since this job began"):
        prompts(opened(tmp_path), cursor)


def test_a_file_that_changes_after_it_was_found_is_noticed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "a"}])
    source = opened(path)
    write_lines(path, [{"prompt": "a"}, {"prompt": "b"}])
    with pytest.raises(InputError, match="changed while it was being read"):
        prompts(source)


@pytest.mark.parametrize("rows", [0, 5, 40], ids=["emptied", "shorter", "longer"])
def test_a_jsonl_that_is_written_anew_while_it_is_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr("specbatch.pipeline.inputs.jsonl.ROWS_PER_BATCH", 10)
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": f"{i}" * 9999} for i in range(30)])
    batches = opened(path).read()
    assert len(next(batches).rows) == 10
    write_lines(path, [{"prompt": "another"}] * rows)
    with pytest.raises(InputError, match=rf"{path} changed since this job began reading it"):
        list(batches)


def write_columns(path: Path, prompts: list[str]) -> None:
    """Row groups or record batches of ten rows, in the file that is there if there is one."""
    table = pa.table({"prompt": prompts})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=10)
        return
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("rows", [3, 30])  # 30: groups of the same rows at the same places
def test_a_columnar_file_that_is_written_anew_while_it_is_read_is_noticed(
    tmp_path: Path, kind: str, rows: int
) -> None:
    path = tmp_path / f"a.{kind}"
    write_columns(path, ["one of the old"] * 30)
    batches = opened(path).read()
    assert len(next(batches).rows) == 10
    write_columns(path, ["one of the new"] * rows)
    with pytest.raises(InputError, match=rf"{path} changed since this job began reading it"):
        list(batches)


def test_a_jsonl_whose_name_another_took_is_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbatch.pipeline.inputs.jsonl.ROWS_PER_BATCH", 10)
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": f"{i}" * 9999} for i in range(30)])
    batches = opened(path).read()
    rows = len(next(batches).rows)
    write_lines(tmp_path / "new", [{"prompt": "another"}]).replace(path)
    assert rows + sum(len(batch.rows) for batch in batches) == 30


# --- reading ------------------------------------------------------------------------------------
def test_resuming_does_not_open_earlier_files(tmp_path: Path) -> None:
    for name in "abc":
        write_parquet(tmp_path / f"{name}.parquet", {"prompt": [name] * 3}, 2)
    source = opened(tmp_path)
    cursor = next(b for b in source.read() if b.uri.endswith("b.parquet")).position(1)
    (tmp_path / "a.parquet").write_bytes(b"not needed any more")
    assert prompts(source, cursor) == ["b", "b", "c", "c", "c"]


def test_ids_until_stops_exactly_at_the_position(tmp_path: Path) -> None:
    for name in "ab":
        rows = [f"{name}{i}" for i in range(25)]
        write_parquet(tmp_path / "p" / f"{name}.parquet", {"prompt": rows, "id": rows}, 10)
        (tmp_path / "j").mkdir(exist_ok=True)
        write_lines(tmp_path / "j" / f"{name}.jsonl", [{"prompt": r, "id": r} for r in rows])
    for folder in ("p", "j"):
        source = opened(tmp_path / folder)
        seen: list[Any] = []
        for batch in source.read():
            for index, row in enumerate(batch.rows):
                ids = [i for part in source.ids_until(batch.position(index)) for i in part]
                assert ids == seen
                seen.append(row.id)
        assert len(seen) == 50


def test_batches_shrink_where_rows_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    rows = [os.urandom(2000).hex() for _ in range(300)]
    path = write_parquet(tmp_path / "a.parquet", {"prompt": rows}, 300)
    lines = write_lines(tmp_path / "a.jsonl", [{"prompt": row} for row in rows])
    for module in ("columnar", "jsonl"):
        monkeypatch.setattr(f"specbatch.pipeline.inputs.{module}.BYTES_PER_BATCH", 100_000)
    for file in (path, lines):
        batches = list(opened(file).read())
        assert 10 < len(batches) < 20
        assert [row.prompt for batch in batches for row in batch.rows] == rows


def test_a_giant_line_is_a_bad_row_and_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbatch.pipeline.inputs.jsonl.MAX_LINE_BYTES", 50)
    values = [{"prompt": "a"}, {"prompt": "x" * 500}, {"prompt": "b"}]
    (batch,) = opened(write_lines(tmp_path / "a.jsonl", values)).read()
    assert [row.prompt for row in batch.rows] == ["a", None, "b"]
    assert batch.rows[1].problem == ("too_long", "the line has 513 bytes; at most 50 are read")


def test_a_byte_order_mark_and_a_missing_last_newline_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}')
    source = opened(path)
    source.check()
    assert prompts(source) == ["a", "b"]


def test_jsonl_may_be_compressed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n{"prompt": "b"}\n'))
    source = opened(path)
    assert source.format == "jsonl"
    (batch,) = source.read()
    assert prompts(source, batch.position(1)) == ["b"]
    assert prompts(opened(tmp_path)) == ["a", "b"]
    path.write_bytes(path.read_bytes()[:-5])
    assert "is truncated or not gzip" in refusal(path)


def test_format_sniffing_reads_past_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n\n{"custom_id": "1", "body": {"messages": []}}\n')
    assert opened(path).format == "openai"


# --- S3, over HTTP ------------------------------------------------------------------------------
def test_s3_prefixes_keys_and_globs_are_read(s3: Objects, bucket: str, tmp_path: Path) -> None:
    for name in ("in/b", "in/a", "other/c"):
        file = write_parquet(tmp_path / "x.parquet", {"prompt": [name] * 3}, 2)
        s3.put_file(f"{bucket}/{name}.parquet", file)
    folder = opened(f"{bucket}/in/", s3)
    folder.check()
    assert prompts(folder) == ["in/a"] * 3 + ["in/b"] * 3
    assert prompts(opened(f"{bucket}/in", s3)) == prompts(folder)
    assert prompts(opened(f"{bucket}/other/c.parquet", s3)) == ["other/c"] * 3
    assert prompts(opened(f"{bucket}/*/b.parquet", s3)) == ["in/b"] * 3
    cursor = list(folder.read())[1].position(0)
    assert prompts(folder, cursor) == ["in/a"] + ["in/b"] * 3


@pytest.mark.parametrize("glob", GLOBS)
def test_an_s3_glob_finds_what_is_hidden_only_by_its_name(
    s3: Objects, bucket: str, tmp_path: Path, glob: str
) -> None:
    for name in FILES:
        file = write_parquet(tmp_path / "x.parquet", {"prompt": [name]})
        s3.put_file(f"{bucket}/_in/{name}.parquet", file)
    assert sorted(prompts(opened(f"{bucket}/_in/{glob}", s3))) == GLOBS[glob]


def test_a_bucket_is_a_folder_and_a_key_may_look_like_a_glob(
    s3: Objects, bucket: str, tmp_path: Path
) -> None:
    for name in ("a[1]", "b"):
        file = write_parquet(tmp_path / "x.parquet", {"prompt": [name]})
        s3.put_file(f"{bucket}/{name}.parquet", file)
    assert prompts(opened(bucket, s3)) == ["a[1]", "b"]
    assert prompts(opened(f"{bucket}/a[1].parquet", s3)) == ["a[1]"]


def test_an_s3_glob_lists_once_and_looks_at_no_key(
    s3: Objects, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is called like it comes first: a key, then a folder."""
    for name in ("in[1]/a", "in1/b", "in1/c", "x[1]", "x1"):
        file = write_parquet(tmp_path / "x.parquet", {"prompt": [name]})
        s3.put_file(f"{bucket}/{name}.parquet", file)
    asked: list[str] = []
    listing = Objects.list
    monkeypatch.setattr(Objects, "list", lambda *a: asked.append("list") or listing(*a))
    monkeypatch.setattr(Objects, "head", lambda *_: asked.append("head"))
    found = {
        "in[1]": ["in[1]/a"], "in[1]/": ["in[1]/a"], "in[1]/*.parquet": ["in1/b", "in1/c"],
        "x[1].parquet": ["x[1]"], "x?.parquet": ["x1"],
    }  # fmt: skip
    for glob, names in found.items():
        asked.clear()
        files = opened(f"{bucket}/{glob}", s3).files
        assert [info.uri for info in files] == [f"{bucket}/{name}.parquet" for name in names]
        assert asked == ["list"]


def test_an_s3_glob_with_a_wrong_class_is_named(s3: Objects, bucket: str) -> None:
    with pytest.raises(InputError, match=r"input s3://.*/\[z-a\]\*\.jsonl is not a glob: bad char"):
        opened(f"{bucket}/[z-a]*.jsonl", s3)


def test_a_local_glob_that_python_does_not_take_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"input .*a\*\*\.parquet"):
        opened(f"{tmp_path}/a**.parquet")


def test_a_replaced_s3_object_is_noticed(s3: Objects, bucket: str) -> None:
    s3.put_bytes(f"{bucket}/a.jsonl", b'{"prompt": "a"}\n{"prompt": "b"}\n')
    source = opened(f"{bucket}/a.jsonl", s3)
    (batch,) = source.read()
    s3.put_bytes(f"{bucket}/a.jsonl", b'{"prompt": "a"}\n{"prompt": "c"}\n')
    with pytest.raises(InputError, match="changed while it was being read"):
        prompts(source)
    with pytest.raises(InputError, match="changed since this job began"):
        prompts(opened(f"{bucket}/a.jsonl", s3), batch.position(1))


def test_a_parquet_object_replaced_between_row_groups_is_noticed(
    s3: Objects, bucket: str, tmp_path: Path
) -> None:
    rows = [f"{i}".zfill(1000) for i in range(40_000)]  # larger than any read-ahead
    table = pa.table({"prompt": rows})
    pq.write_table(table, tmp_path / "a", row_group_size=5000, compression="none")
    uri = f"{bucket}/a.parquet"
    s3.put_file(uri, tmp_path / "a")
    batches = opened(uri, s3).read()
    next(batches)
    s3.put_bytes(uri, (tmp_path / "a").read_bytes()[:-1] + b"!")
    with pytest.raises(InputError, match="changed while it was being read"):
        list(batches)


def test_missing_s3_inputs_are_input_errors(s3: Objects, bucket: str) -> None:
    with pytest.raises(InputError, match="does not exist or is empty"):
        opened(f"{bucket}/none/", s3)
    with pytest.raises(InputError, match="no such bucket"):
        opened("s3://no-such-bucket-x/a.parquet", s3)


def test_a_batch_in_parts_has_the_same_rows_at_the_same_places() -> None:
    offsets = [0, 10, 25, 26, 40, 41]
    batch = RawBatch("in.jsonl", "v", 0, offsets, "auto", [RawRow(id=i) for i in range(5)])
    parts = list(batch.parts(2))
    assert [[row.id for row in part.rows] for part in parts] == [[0, 1], [2, 3], [4]]
    assert [[part.position(i).row_offset for i in range(len(part.rows) + 1)] for part in parts] == [
        [0, 10, 25],
        [25, 26, 40],
        [40, 41],
    ]
    [empty] = RawBatch("in.jsonl", "v", 0, [7], "auto").parts(2)
    assert (empty.rows, empty.position(0)) == ([], SourcePosition("in.jsonl", "v", 0, 7))
