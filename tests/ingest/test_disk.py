"""A local disk that is full or may not be written: one sentence, no half file, and on it goes."""

from __future__ import annotations

import errno
import os
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from ledger.builders import completion

from specbatch.pipeline.outputs.export_columns import token_batch
from specbatch.pipeline.outputs.exports import ExportWriter
from specbatch.pipeline.outputs.outputs import OutputWriter, read_output
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.errors import ObjectError, OutputError
from specbatch.schemas.export_arrow import TOKENS
from specbatch.schemas.exports import ExportKind
from support.traced import traced

LARGE = b"x" * (1 << 20)


@contextmanager
def small_files(most: int = 1 << 14) -> Iterator[None]:
    """No file of this process may grow beyond so many bytes: real writes fail half way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_a_write_that_fails_half_way_leaves_nothing_and_may_be_repeated(tmp_path: Path) -> None:
    objects, uri = Objects(), str(tmp_path / "a" / "b.bin")
    with small_files(), pytest.raises(ObjectError) as caught:
        objects.put_bytes(uri, LARGE)
    assert str(caught.value) == (
        f"cannot write {uri}: file too large; raise the limit on the size of files (`ulimit -f`)"
    )
    assert files(tmp_path) == []
    artefact = objects.put_bytes(uri, LARGE)
    assert objects.get_bytes(uri, artefact) == LARGE


@pytest.mark.parametrize(
    ("number", "reason", "remedy"),
    [
        (errno.ENOSPC, "no space left on device", "free space there"),
        (errno.EDQUOT, "disk quota exceeded", "free space there, or raise this user's quota"),
        (
            *(errno.EROFS, "read-only file system"),
            "make it writable again (`mount -o remount,rw`)",
        ),
        (errno.EACCES, "permission denied", "let the worker's user write there"),
    ],
)
@pytest.mark.parametrize("step", ["open", "write to", "rename"])
@pytest.mark.parametrize("operation", ["put_bytes", "put_file", "put_new"])
def test_each_refusal_names_the_file_and_what_to_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    reason: str,
    remedy: str,
    step: str,
    operation: str,
) -> None:
    objects, uri = Objects(), str(tmp_path / "out" / "b.bin")
    (tmp_path / "source").write_bytes(LARGE)
    value: Any = tmp_path / "source" if operation == "put_file" else LARGE

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        match step:
            case "open":
                patch.setattr(Path, "mkdir", refuse)
            case "write to":
                patch.setattr(os, "fsync", refuse)  # where a full disk shows at the latest
            case _:
                patch.setattr(Path, "replace", refuse)
                patch.setattr(Path, "rename", refuse)
                patch.setattr(Path, "hardlink_to", refuse)
        with pytest.raises(ObjectError) as caught:
            getattr(objects, operation)(uri, value)
    said = str(caught.value)
    assert said == f"cannot write {uri}: {reason}; {remedy}"
    assert files(tmp_path) == ["source"]
    getattr(objects, operation)(uri, value)
    assert objects.get_bytes(uri) == LARGE


def test_an_output_on_a_full_disk_is_not_finished_and_can_be_written_later(
    tmp_path: Path,
) -> None:
    objects = Objects(scratch=tmp_path / "scratch")
    uri = str(tmp_path / "out")
    rows = [completion(row, text=os.urandom(2000).hex()) for row in range(50)]

    def write() -> None:
        OutputWriter(objects, uri, "job00000000000001").write(rows, [], openai="openai")

    with small_files(), pytest.raises((ObjectError, OutputError)) as caught:
        write()
    assert "file too large" in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert files(tmp_path) == ["out/_specbatch_job.json"]
    write()
    assert read_output(uri, objects).num_rows == 50
    assert files(tmp_path / "scratch") == []


def test_a_scratch_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    objects = Objects(scratch=tmp_path / "file" / "sub")
    with (
        pytest.raises(ObjectError, match=r"cannot write .*/file/sub: not a directory"),
        objects.temp_folder(),
    ):
        pass


def test_an_export_that_finds_no_room_leaves_nothing_and_may_be_repeated(tmp_path: Path) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        draw = random.Random(1)
        for row in range(50):
            yield token_batch("job", [traced(draw, row)[0]])

    objects = Objects(scratch=tmp_path / "scratch")
    writer = ExportWriter(
        objects, f"{tmp_path}/out/t.parquet", ExportKind.TOKENS, row_group_bytes=1000
    )
    with small_files(2000), pytest.raises(ObjectError, match=r"cannot write .*: file too large"):
        writer.write(TOKENS, batches(), {})
    assert files(tmp_path) == []
    writer.write(TOKENS, batches(), {})
    assert files(tmp_path) == ["out/t.parquet"]
