"""Exported files: whole or not there, never over another one unasked, the same bytes each time."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specbatch.pipeline.outputs.export_columns import token_batch
from specbatch.pipeline.outputs.exports import ExportWriter
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.errors import ObjectError, OutputError
from specbatch.schemas.export_arrow import TOKENS
from specbatch.schemas.exports import ExportKind, WrittenFile
from specbatch.schemas.records import Artefact
from support.faulty_s3 import Fault, FaultyS3
from support.traced import traced

ABOUT = {"specbatch_job": "job"}


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Objects, str]:
    if request.param == "local":
        return Objects(), str(tmp_path / "root")
    return request.getfixturevalue("s3"), request.getfixturevalue("bucket") + "/root"


def batches(number: int = 4, seed: int = 1) -> Iterator[pa.RecordBatch]:
    draw = random.Random(seed)
    for index in range(number):
        yield token_batch("job", [traced(draw, index * 10 + i)[0] for i in range(10)])


def write(place: tuple[Objects, str], name: str, **options: Any) -> tuple[WrittenFile, ...]:
    objects, root = place
    seed, number = options.pop("seed", 1), options.pop("number", 4)
    writer = ExportWriter(objects, f"{root}/{name}", ExportKind.TOKENS, **options)
    return writer.write(TOKENS, batches(number, seed), ABOUT)


def read(place: tuple[Objects, str], name: str) -> pa.Table:
    objects, root = place
    return pq.read_table(pa.BufferReader(objects.get_bytes(f"{root}/{name}")))


def names(place: tuple[Objects, str]) -> list[str]:
    objects, root = place
    return [info.uri.removeprefix(f"{root}/") for info in objects.list(f"{root}/")]


def expected(seed: int = 1, number: int = 4) -> list[dict[str, Any]]:
    return [row for batch in batches(number, seed) for row in batch.to_pylist()]


def test_a_name_in_parquet_is_one_file(place: tuple[Objects, str]) -> None:
    (file,) = write(place, "a/t.parquet", part_bytes=1, row_group_bytes=1)
    table = read(place, "a/t.parquet")
    assert table.to_pylist() == expected()
    assert names(place) == ["a/t.parquet"]
    objects, root = place
    data = objects.get_bytes(f"{root}/a/t.parquet")
    digest = hashlib.sha256(data).hexdigest()
    assert file == WrittenFile("t.parquet", table.num_rows, len(data), digest)
    assert table.schema.metadata[b"specbatch_job"] == b"job"
    assert table.schema.field("ticks").metadata == TOKENS.field("ticks").metadata


def test_another_name_is_a_folder_of_parts_with_a_manifest(place: tuple[Objects, str]) -> None:
    files = write(place, "out/", part_bytes=1, row_group_bytes=1)
    parts = [f"tokens/tokens-{number:05d}.parquet" for number in range(4)]
    assert [file.name for file in files] == parts
    assert sorted(names(place)) == [f"out/{name}" for name in ("tokens-manifest.json", *parts)]
    objects, root = place
    manifest = orjson.loads(objects.get_bytes(f"{root}/out/tokens-manifest.json"))
    assert (manifest["kind"], manifest["about"]) == ("tokens", ABOUT)
    assert manifest["rows"] == len(expected())
    rows = []
    for part in manifest["files"]:
        uri = f"{root}/out/{part['name']}"
        objects.get_bytes(uri, Artefact(uri, part["sha256"], part["size_bytes"]))
        rows += read(place, f"out/{part['name']}").to_pylist()
    assert rows == expected()


def test_a_small_set_is_one_part(place: tuple[Objects, str]) -> None:
    assert [file.name for file in write(place, "out")] == ["tokens/tokens-00000.parquet"]


def test_nothing_is_an_empty_file_with_all_columns(place: tuple[Objects, str]) -> None:
    write(place, "t.parquet", number=0)
    write(place, "out", number=0)
    for name in ("t.parquet", "out/tokens/tokens-00000.parquet"):
        table = read(place, name)
        assert (table.num_rows, table.schema.names) == (0, TOKENS.names)


def test_the_same_batches_give_the_same_bytes(place: tuple[Objects, str]) -> None:
    first, second = write(place, "a"), write(place, "b")
    assert first == second
    (alone,) = write(place, "c.parquet")
    assert alone.sha256 == first[0].sha256


@pytest.mark.parametrize("name", ["t.parquet", "out"])
def test_what_is_there_is_replaced_only_when_asked(place: tuple[Objects, str], name: str) -> None:
    first = write(place, name)
    with pytest.raises(OutputError, match=r"exists already; .* --overwrite"):
        write(place, name, seed=2)
    assert names(place)  # and it is still the first one
    second = write(place, name, seed=2, overwrite=True)
    assert first != second
    path = name if name.endswith(".parquet") else f"{name}/tokens/tokens-00000.parquet"
    assert read(place, path).to_pylist() == expected(seed=2)


def test_replacing_leaves_no_part_of_what_was_there(place: tuple[Objects, str]) -> None:
    objects, root = place
    write(place, "out", part_bytes=1, row_group_bytes=1)
    for stranger in ("tokens-1.parquet", "costs-00000.parquet", "part-00000.parquet"):
        objects.put_bytes(f"{root}/out/{stranger}", b"not ours")
    write(place, "out", overwrite=True)
    assert sorted(names(place)) == [
        "out/costs-00000.parquet",
        "out/part-00000.parquet",
        "out/tokens-1.parquet",
        "out/tokens-manifest.json",
        "out/tokens/tokens-00000.parquet",
    ]


def test_an_export_of_an_earlier_version_is_replaced(place: tuple[Objects, str]) -> None:
    """Its parts lie beside its manifest."""
    objects, root = place
    for name in ("tokens-00000.parquet", "tokens-00001.parquet", "tokens-manifest.json"):
        objects.put_bytes(f"{root}/out/{name}", b"earlier")
    with pytest.raises(OutputError, match=r"tokens-00000.parquet exists already; .* --overwrite"):
        write(place, "out")
    write(place, "out", overwrite=True)
    assert sorted(names(place)) == ["out/tokens-manifest.json", "out/tokens/tokens-00000.parquet"]


def test_a_file_that_would_be_read_as_a_part_stands_in_the_way(place: tuple[Objects, str]) -> None:
    objects, root = place
    objects.put_bytes(f"{root}/out/tokens/.hidden", b"x")
    write(place, "out")
    objects.put_bytes(f"{root}/out/tokens/mine.parquet", b"x")
    with pytest.raises(OutputError, match=r"tokens/mine\.parquet is not of such an export"):
        write(place, "out", overwrite=True)


def test_while_parts_are_replaced_there_is_no_manifest(place: tuple[Objects, str]) -> None:
    objects, root = place
    write(place, "out")

    def failing() -> Iterator[pa.RecordBatch]:
        yield from batches(2, seed=2)
        raise ObjectError("the rest cannot be read")

    writer = ExportWriter(objects, f"{root}/out", ExportKind.TOKENS, True, 1, 1)
    with pytest.raises(ObjectError, match="the rest cannot be read"):
        writer.write(TOKENS, failing(), ABOUT)
    assert "out/tokens-manifest.json" not in names(place)


def test_an_export_that_fails_leaves_no_file(place: tuple[Objects, str]) -> None:
    def failing() -> Iterator[pa.RecordBatch]:
        yield from batches(2)
        raise ObjectError("the rest cannot be read")

    objects, root = place
    writer = ExportWriter(objects, f"{root}/t.parquet", ExportKind.TOKENS, row_group_bytes=1)
    with pytest.raises(ObjectError, match="the rest cannot be read"):
        writer.write(TOKENS, failing(), ABOUT)
    assert names(place) == []


def test_a_file_that_somebody_else_wrote_meanwhile_is_left_alone(
    place: tuple[Objects, str],
) -> None:
    objects, root = place

    def overtaken() -> Iterator[pa.RecordBatch]:
        yield from batches(1)
        objects.put_bytes(f"{root}/t.parquet", b"theirs")

    writer = ExportWriter(objects, f"{root}/t.parquet", ExportKind.TOKENS)
    with pytest.raises(OutputError, match="written by another process meanwhile"):
        writer.write(TOKENS, overtaken(), ABOUT)
    assert objects.get_bytes(f"{root}/t.parquet") == b"theirs"


def test_a_local_place_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder.parquet").mkdir()
    for to, message in {
        "file": "is a file; name a folder",
        "folder.parquet": "is a folder; name a file",
        "file/x.parquet": "cannot be",
        "file/x": "cannot be",
    }.items():
        with pytest.raises(OutputError, match=message):
            ExportWriter(Objects(), f"{tmp_path}/{to}", ExportKind.TOKENS).check()


def test_a_name_without_a_folder_lies_in_the_working_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ExportWriter(Objects(), "t.parquet", ExportKind.TOKENS).write(TOKENS, batches(), ABOUT)
    assert pq.read_table("t.parquet").to_pylist() == expected()


# --- S3 -----------------------------------------------------------------------------------------
def test_a_bucket_that_is_not_there_is_told_before_anything_is_read(s3: Objects) -> None:
    for to in ("s3://no-such-bucket-x/t.parquet", "s3://no-such-bucket-x/out", "s3://b.parquet"):
        with pytest.raises(OutputError, match=r"cannot be used: .* no such bucket"):
            ExportWriter(s3, to, ExportKind.TOKENS).check()


def test_an_upload_that_arrives_cut_is_deleted_and_told(
    s3_server: str, s3: Objects, bucket: str
) -> None:
    with FaultyS3(s3_server) as proxy:
        proxy.fail(Fault.CUT_UPLOAD, "PUT", "t.parquet")
        writer = ExportWriter(Objects(proxy.url), f"{bucket}/t.parquet", ExportKind.TOKENS)
        with pytest.raises(ObjectError, match="did not arrive whole"):
            writer.write(TOKENS, batches(), ABOUT)
        assert [fault for _, fault in proxy.faults] == [Fault.CUT_UPLOAD]
    assert s3.list(f"{bucket}/") == []


def test_of_parts_one_that_arrives_cut_leaves_no_manifest(
    s3_server: str, s3: Objects, bucket: str
) -> None:
    with FaultyS3(s3_server) as proxy:
        proxy.fail(Fault.CUT_UPLOAD, "PUT", "tokens-00002")
        writer = ExportWriter(Objects(proxy.url), f"{bucket}/out", ExportKind.TOKENS, False, 1, 1)
        with pytest.raises(ObjectError, match="did not arrive whole"):
            writer.write(TOKENS, batches(), ABOUT)
    left = [info.uri.rpartition("/")[2] for info in s3.list(f"{bucket}/")]
    assert left == ["tokens-00000.parquet", "tokens-00001.parquet"]


def test_failures_that_pass_are_put_up_with(s3_server: str, s3: Objects, bucket: str) -> None:
    with FaultyS3(s3_server) as proxy:
        proxy.fail(Fault.UNAVAILABLE, "PUT", times=1)
        proxy.fail(Fault.LOST_ANSWER, "PUT", times=1)
        proxy.fail(Fault.UNAVAILABLE, "HEAD", times=1)
        writer = ExportWriter(Objects(proxy.url), f"{bucket}/t.parquet", ExportKind.TOKENS)
        (file,) = writer.write(TOKENS, batches(), ABOUT)
        assert len(proxy.faults) == 3
    found = s3.head(f"{bucket}/t.parquet")
    assert found is not None
    assert found.size == file.size_bytes


class Forgetful(Objects):
    """A file system that says it wrote a file, and wrote the half of it."""

    def put_file(self, uri: str, local_path: Path, staging: str | None = None) -> Artefact:
        artefact = super().put_file(uri, local_path, staging)
        data = Path(uri).read_bytes()
        Path(uri).write_bytes(data[: len(data) // 2])
        return artefact


def test_a_local_file_that_is_cut_is_noticed(tmp_path: Path) -> None:
    writer = ExportWriter(Forgetful(), f"{tmp_path}/t.parquet", ExportKind.TOKENS)
    with pytest.raises(ObjectError, match="did not arrive whole"):
        writer.write(TOKENS, batches(), ABOUT)
    assert list(tmp_path.iterdir()) == []
