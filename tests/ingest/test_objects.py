"""Files by uri: one body for local folders and a real S3 server, then what is special to each."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from specbatch.pipeline.storage import s3 as s3_module
from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.storage.s3 import S3Objects
from specbatch.schemas.errors import ObjectError


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Objects, str]:
    if request.param == "local":
        return Objects(), str(tmp_path / "root")
    return request.getfixturevalue("s3"), request.getfixturevalue("bucket") + "/root"


def test_bytes_come_back_and_are_named_by_their_hash(place: tuple[Objects, str]) -> None:
    objects, root = place
    artefact = objects.put_bytes(f"{root}/a/b.bin", b"hello")
    assert artefact.size_bytes == 5
    assert artefact.sha256.startswith("2cf24dba")
    assert objects.get_bytes(f"{root}/a/b.bin", artefact) == b"hello"
    assert objects.exists(f"{root}/a/b.bin")


def test_a_file_is_put_whole(
    place: tuple[Objects, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_module, "PART_BYTES", 5 << 20)  # S3's smallest: several parts
    objects, root = place
    data = bytes(range(256)) * (12 << 12)
    (tmp_path / "f").write_bytes(data)
    artefact = objects.put_file(f"{root}/f", tmp_path / "f")
    assert objects.get_bytes(f"{root}/f", artefact) == data
    assert (tmp_path / "f").exists()


@pytest.mark.parametrize("damage", [b"hellO", b"hell", b"hello!"])
def test_wrong_bytes_are_noticed(place: tuple[Objects, str], damage: bytes) -> None:
    objects, root = place
    artefact = objects.put_bytes(f"{root}/a", b"hello")
    objects.put_bytes(f"{root}/a", damage)
    with pytest.raises(ObjectError, match=r"/a (fails its SHA-256 check|has \d bytes)"):
        objects.get_bytes(f"{root}/a", artefact)


def test_a_missing_file_is_named(place: tuple[Objects, str]) -> None:
    objects, root = place
    assert objects.head(f"{root}/none") is None
    assert not objects.exists(f"{root}/none")
    objects.delete(f"{root}/none")
    with pytest.raises(ObjectError, match=r"cannot read .*/root/none: no such"):
        objects.get_bytes(f"{root}/none")
    with pytest.raises(ObjectError, match=r"cannot read .*/root/none: no such"):
        objects.open(f"{root}/none")


def test_listing_is_sorted_and_recursive(place: tuple[Objects, str]) -> None:
    objects, root = place
    for name in ("b", "a", "sub/c"):
        objects.put_bytes(f"{root}/{name}", name.encode())
    found = objects.list(root + "/")
    assert [info.uri for info in found] == [f"{root}/a", f"{root}/b", f"{root}/sub/c"]
    assert [info.size for info in found] == [1, 1, 5]
    assert objects.list(f"{root}/nothing/") == []
    objects.delete(f"{root}/a")
    assert [info.uri for info in objects.list(root + "/")] == [f"{root}/b", f"{root}/sub/c"]


def test_a_new_content_has_a_new_version(place: tuple[Objects, str]) -> None:
    objects, root = place
    objects.put_bytes(f"{root}/a", b"one")
    first = objects.head(f"{root}/a")
    assert first is not None
    assert objects.list(root + "/") == [first]
    objects.put_bytes(f"{root}/a", b"twoo")
    with pytest.raises(ObjectError, match="changed while"):
        objects.open(f"{root}/a", first.version)


def test_put_new_lets_only_the_first_win(place: tuple[Objects, str]) -> None:
    objects, root = place
    assert objects.put_new(f"{root}/m", b"first")
    assert not objects.put_new(f"{root}/m", b"second")
    assert objects.get_bytes(f"{root}/m") == b"first"


def test_of_many_at_once_put_new_lets_one_win(place: tuple[Objects, str]) -> None:
    objects, root = place
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda i: objects.put_new(f"{root}/m", b"%d" % i), range(8)))
    assert sum(won) == 1
    assert objects.get_bytes(f"{root}/m") == b"%d" % won.index(True)


def test_open_reads_at_random(place: tuple[Objects, str]) -> None:
    objects, root = place
    data = bytes(range(256)) * 100
    objects.put_bytes(f"{root}/a", data)
    with objects.open(f"{root}/a") as file:
        file.seek(-6, 2)
        assert file.read() == data[-6:]
        file.seek(1000)
        assert file.read(300) == data[1000:1300]
        assert file.read(0) == b""
        assert file.seek(10**6) == 10**6
        assert file.read(5) == b""


def test_temp_folder_is_gone_afterwards(tmp_path: Path) -> None:
    with Objects(scratch=tmp_path / "scratch").temp_folder() as folder:
        (folder / "x").write_text("x")
        assert folder.parent == tmp_path / "scratch"
    assert not folder.exists()


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ObjectError, match=r"`ftp://` is not supported"):
        Objects().head("ftp://bucket/x")


# --- local --------------------------------------------------------------------------------------
def test_a_failed_local_write_leaves_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    objects = Objects()
    objects.put_bytes(str(tmp_path / "a"), b"old")
    with pytest.raises(ObjectError, match="cannot write"):
        objects.put_file(str(tmp_path / "a"), tmp_path)  # a folder cannot be read
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


def test_a_list_lacks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what is hidden nor, in silence, what may not be read. Linked folders are others'."""
    for name in ("a/.b/c", "a/d", "a.x", "else/e"):
        Objects().put_bytes(str(tmp_path / name), b"x")
    (tmp_path / "a" / "link").symlink_to(tmp_path / "else")
    found = [info.uri for info in Objects().list(str(tmp_path / "a"))]
    assert found == [f"{tmp_path}/a/.b/c", f"{tmp_path}/a/d"]
    assert Objects().list(str(tmp_path))[0].uri == f"{tmp_path}/a.x"
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith(".b"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ObjectError, match=r"cannot list .*/a/\.b: permission denied"):
        Objects().list(str(tmp_path))


@pytest.fixture
def no_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on exFAT, and on some shares and mounts."""

    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(self), None, str(target))

    monkeypatch.setattr(Path, "hardlink_to", refuse)


class Killed(BaseException):
    """What nobody catches."""


@pytest.mark.usefixtures("no_hard_links")
def test_put_new_without_hard_links_leaves_a_whole_file_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is killed just before the file gets its name."""
    path = tmp_path / "m"

    def kill(*_: Any) -> None:
        assert not path.exists(), "nobody meets half a file"
        raise Killed

    for name in ("rename", "replace"):
        monkeypatch.setattr(Path, name, kill)
    with pytest.raises(Killed):
        Objects().put_new(str(path), b"first")
    assert not path.exists()


@pytest.mark.usefixtures("no_hard_links")
def test_one_of_many_writers_at_once_wins_without_hard_links(tmp_path: Path) -> None:
    uri, writers = str(tmp_path / "m"), 8
    together = threading.Barrier(writers)

    def write(number: int) -> bool:
        together.wait()
        return Objects().put_new(uri, bytes([number]))

    for _ in range(20):
        with ThreadPoolExecutor(writers) as pool:
            won = list(pool.map(write, range(writers)))
        assert won.count(True) == 1
        assert Path(uri).read_bytes() == bytes([won.index(True)])
        Path(uri).unlink()


@pytest.mark.usefixtures("no_hard_links")
def test_put_new_does_without_hard_links(tmp_path: Path) -> None:
    assert Objects().put_new(str(tmp_path / "m"), b"first")
    assert not Objects().put_new(str(tmp_path / "m"), b"second")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert (tmp_path / "m").read_bytes() == b"first"


def test_file_scheme_means_a_local_path(tmp_path: Path) -> None:
    Objects().put_bytes(f"file://{tmp_path}/a", b"x")
    assert (tmp_path / "a").read_bytes() == b"x"


# --- S3 -----------------------------------------------------------------------------------------
def test_a_missing_bucket_is_named(s3: Objects) -> None:
    with pytest.raises(ObjectError, match=r"s3://no-such-bucket-x/a: no such bucket"):
        s3.put_bytes("s3://no-such-bucket-x/a", b"x")


def test_a_uri_without_bucket_or_with_credentials_is_refused_unrepeated(s3: Objects) -> None:
    for uri in ("s3:///key", "s3://user:password@bucket/key"):
        with pytest.raises(ObjectError, match="looks like s3://bucket/key") as caught:
            s3.get_bytes(uri)
        assert "password" not in str(caught.value)


@pytest.mark.usefixtures("s3_credentials")
def test_an_unreachable_store_gives_up_in_time_without_secrets() -> None:
    store = S3Objects("http://user:pass-word@127.0.0.1:9", retry_sec=1.0)
    with pytest.raises(ObjectError, match=r"127\.0\.0\.1:9") as caught:
        store.get_bytes("s3://bucket/key")
    assert "pass-word" not in str(caught.value)
    assert "very-secret" not in str(caught.value)


def test_a_multipart_upload_that_fails_is_aborted(
    s3: Objects, s3_client: Any, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_module, "PART_BYTES", 1 << 10)  # S3 refuses to complete such parts
    (tmp_path / "f").write_bytes(b"x" * 4000)
    with pytest.raises(ObjectError, match="EntityTooSmall"):
        s3.put_file(f"{bucket}/f", tmp_path / "f")
    name = bucket.removeprefix("s3://")
    assert s3_client.list_multipart_uploads(Bucket=name).get("Uploads", []) == []
    assert not s3.exists(f"{bucket}/f")


def test_the_object_read_is_the_version_opened(s3: Objects, bucket: str) -> None:
    s3.put_bytes(f"{bucket}/a", b"x" * 100)
    file = s3.open(f"{bucket}/a")
    s3.put_bytes(f"{bucket}/a", b"y" * 100)
    with pytest.raises(ObjectError, match="changed while"):
        file.read(10)


def test_without_boto3_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['boto3'] = None\n"
        "from specbatch.pipeline.storage.objects import Objects\n"
        "assert Objects().head('/local/paths/need/none') is None\n"
        "Objects().head('s3://bucket/key')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MissingExtraError: s3:// needs boto3: pip install 'specbatch[s3]'" in done.stderr
