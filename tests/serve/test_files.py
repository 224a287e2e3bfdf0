"""Files: streamed to the disk, listed when they are whole, opened by their owners only."""

from __future__ import annotations

import errno
import hashlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from serve.conftest import Served, jsonl, line, listening

from specbatch.jobs.serve.file_store import FileStore
from specbatch.schemas.errors import StoreError, UsageError
from specbatch.schemas.serving import Purpose

CONTENT = jsonl(line("a"), line("b"))


def test_a_file_is_kept_as_it_was_sent(served: Served) -> None:
    client = served.client()
    file = client.files.create(file=("my batch.jsonl", CONTENT), purpose="batch")
    assert (file.filename, file.bytes, file.purpose) == ("my batch.jsonl", len(CONTENT), "batch")
    assert file.to_dict()["sha256"] == hashlib.sha256(CONTENT).hexdigest()
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == CONTENT
    assert client.files.list().data == [file]
    assert client.files.delete(file.id).deleted
    assert client.files.list().data == []
    assert list(served.service.file_store.files.iterdir()) == []
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)


def test_the_bytes_of_a_file_stay_while_its_row_may_be_there(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, files = type(served.store), served.service.file_store.files
    add_file = store.add_file

    def full(*_: object) -> None:
        raise StoreError("the disk is full")

    def unheard(*values: Any) -> None:
        add_file(*values)
        full()

    client = served.client(max_retries=0)
    monkeypatch.setattr(store, "add_file", unheard)
    file = client.files.create(file=CONTENT, purpose="batch")
    assert client.files.content(file.id).read() == CONTENT
    with monkeypatch.context() as away:
        away.setattr(store, "file", full)
        with pytest.raises(openai.APIStatusError):
            client.files.create(file=CONTENT, purpose="batch")
    for listed in client.files.list():
        assert client.files.content(listed.id).read() == CONTENT
    monkeypatch.setattr(store, "add_file", full)
    with pytest.raises(openai.APIStatusError):
        client.files.create(file=CONTENT, purpose="batch")
    assert len(list(files.iterdir())) == len(client.files.list().data) == 2


def test_files_come_in_pages_and_by_purpose(served: Served) -> None:
    client = served.client()
    ids = [client.files.create(file=CONTENT, purpose="batch").id for _ in range(5)]
    assert [file.id for file in client.files.list(limit=2)] == ids[::-1]  # follows the cursors
    assert [file.id for file in client.files.list(limit=2, order="asc")] == ids
    first = client.files.list(limit=2)
    assert first.has_more
    assert client.files.list(limit=5).has_more is False
    assert client.files.list(purpose=Purpose.OUTPUT.value).data == []
    assert [file.id for file in client.files.list(after="").data] == ids[::-1]  # from the first


def test_an_upload_that_is_cut_off_is_not_listed(served: Served) -> None:
    key = served.key()
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: here\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: 100000\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
    )
    part = '--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n{"a": 1}\n'
    with socket.create_connection(("127.0.0.1", served.port)) as sock:
        sock.sendall((head + part).encode())
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass  # until the service has given it up
    assert served.client(key).files.list().data == []
    assert list(served.service.file_store.uploads.iterdir()) == []


def test_what_a_crash_left_is_swept_and_no_whole_file(served: Served) -> None:
    client, file_store = served.client(), served.service.file_store
    client.files.create(file=CONTENT, purpose="batch")
    (file_store.uploads / "half").write_bytes(b"half")
    file_store.path_of("file-" + "0" * 31).write_bytes(b"without a row")
    assert file_store.sweep() == 1
    assert len(list(file_store.files.iterdir())) == 2


def test_a_store_that_knows_no_file_of_the_folder_is_refused(served: Served) -> None:
    file_store = served.service.file_store
    file_store.check_store(set())  # it has none yet
    file = served.client().files.create(file=CONTENT, purpose="batch")
    file_store.check_store(served.store.file_ids(file_store.service_id))
    with pytest.raises(UsageError, match="knows none of the 1 files"):
        file_store.check_store(served.store.file_ids("another"))
    assert file_store.path_of(file.id).exists()


def next_start(served: Served) -> None:
    """What the command does with the folder, once nobody uses it any more."""
    file_store = FileStore(served.service.file_store.root)
    known = served.store.file_ids(file_store.service_id)
    file_store.check_store(known)
    file_store.finish_changes(known)
    file_store.sweep()
    assert list(file_store.uploads.iterdir()) == []


@contextmanager
def killed_at(
    monkeypatch: pytest.MonkeyPatch, place: object, name: str, after: bool = False
) -> Iterator[None]:
    """Meanwhile who calls the method dies, before or after it does its work."""
    does = getattr(place, name)

    class Killed(BaseException):
        """No handler of errors runs."""

    def dies(*args: object) -> None:
        if after:
            does(*args)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(place, name, dies)
        with pytest.raises(openai.APIError):
            yield


def test_an_upload_killed_before_its_row_is_gone_at_the_next_start(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the first one: a store that knows no file of the folder is refused otherwise."""
    with killed_at(monkeypatch, served.store, "add_file"):
        served.client().files.create(file=CONTENT, purpose="batch")
    assert len(list(served.service.file_store.files.iterdir())) == 1
    next_start(served)
    assert list(served.service.file_store.files.iterdir()) == []


def test_an_upload_killed_after_its_row_is_kept(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_at(monkeypatch, served.store, "add_file", after=True):
        served.client().files.create(file=CONTENT, purpose="batch")
    next_start(served)
    (file,) = served.client().files.list().data
    assert served.client().files.content(file.id).read() == CONTENT


@pytest.mark.parametrize("after_row", [True, False])
def test_a_deletion_that_is_killed_deletes_all_or_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch, after_row: bool
) -> None:
    client, file_store = served.client(), served.service.file_store
    file = client.files.create(file=CONTENT, purpose="batch")
    with killed_at(monkeypatch, served.store, "delete_file", after_row):
        client.files.delete(file.id)
    assert file_store.path_of(file.id).exists()
    next_start(served)
    assert [one.id for one in client.files.list().data] == [file.id] * (not after_row)
    assert file_store.path_of(file.id).exists() is not after_row


def test_the_jobs_copy_goes_with_a_file_whose_deletion_was_killed(served: Served) -> None:
    file_store, file_id = served.service.file_store, "file-" + "0" * 31
    copy = file_store.output_of("batch_" + "0" * 31) / "output.jsonl"
    copy.parent.mkdir()
    for path in (copy, file_store.path_of(file_id)):
        path.write_bytes(CONTENT)
    file_store.mark(file_id, copy)
    next_start(served)
    assert not copy.exists()
    assert not file_store.path_of(file_id).exists()


def test_another_stores_files_stay_whatever_was_cut_off(served: Served) -> None:
    file_store = served.service.file_store
    kept, cut_off = ("file-" + digit * 31 for digit in "01")
    for file_id in (kept, cut_off):
        file_store.path_of(file_id).write_bytes(CONTENT)
    file_store.mark(cut_off)
    with pytest.raises(UsageError, match="knows none of the 1 files"):
        next_start(served)
    assert len(list(file_store.files.iterdir())) == 2


def test_a_full_disk_leaves_nothing_of_an_upload(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("specbatch.jobs.serve.uploads.os.fsync", full)
    with pytest.raises(openai.InternalServerError) as caught:
        served.client().files.create(file=CONTENT, purpose="batch")
    assert (caught.value.status_code, caught.value.code) == (507, "storage_full")
    assert list(served.service.file_store.uploads.iterdir()) == []


def test_a_file_above_the_limit_is_refused(served: Served) -> None:
    object.__setattr__(served.service, "most_file_bytes", 1000)
    with pytest.raises(openai.APIStatusError) as caught:
        served.client().files.create(file=b"x" * 1001, purpose="batch")
    assert caught.value.status_code == 413
    assert caught.value.code == "file_too_large"
    assert list(served.service.file_store.uploads.iterdir()) == []


def test_a_client_that_still_sends_hears_that_its_file_is_too_large(served: Served) -> None:
    object.__setattr__(served.service, "most_file_bytes", 1000)
    for size in (200_000, 20_000_000):
        with pytest.raises(openai.APIStatusError) as caught:
            served.client().files.create(file=b"x" * size, purpose="batch")
        assert caught.value.status_code == 413


@pytest.mark.parametrize(
    ("purpose", "content", "param"), [("vision", CONTENT, "purpose"), ("batch", b"", "file")]
)
def test_a_form_that_cannot_be_taken_is_refused(
    served: Served, purpose: str, content: bytes, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        served.client().files.create(file=("x", content), purpose=purpose)  # type: ignore[arg-type]  # a wrong one
    assert caught.value.param == param
    assert served.client().files.list().data == []


@pytest.mark.parametrize(
    "given", ["../../../etc/passwd", "file-..%2f..%2fspecbatch.db", "file-" + "g" * 31, "file-1"]
)
def test_an_id_of_another_form_is_unknown(served: Served, given: str) -> None:
    client = served.client()
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(given)


def test_a_name_is_data_only(served: Served) -> None:
    client, root = served.client(), served.service.file_store.root
    file = client.files.create(file=("../../evil\0.jsonl", CONTENT), purpose="batch")
    assert "evil" in file.filename
    assert [path.name for path in served.service.file_store.files.iterdir()] == [f"{file.id}.jsonl"]
    assert not list(root.parent.glob("*evil*"))


def test_a_file_that_should_expire_is_refused(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        served.client().files.create(
            file=CONTENT, purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
    assert caught.value.param == "expires_after"


def test_a_file_whose_content_is_missing_is_not_found(served: Served) -> None:
    client = served.client()
    file = client.files.create(file=CONTENT, purpose="batch")
    served.service.file_store.path_of(file.id).unlink()
    with pytest.raises(openai.NotFoundError, match="not in this service's folder"):
        client.files.content(file.id)


def test_a_file_in_another_services_folder_is_not_deleted(served: Served, tmp_path: Path) -> None:
    client = served.client()
    file = client.files.create(file=CONTENT, purpose="batch")
    other = FileStore(tmp_path / "other")
    other.make()
    with listening(replace(served.service, file_store=other)) as port:
        beside = client.with_options(base_url=f"http://127.0.0.1:{port}/v1")
        with pytest.raises(openai.NotFoundError, match="not in this service's folder"):
            beside.files.delete(file.id)
    assert client.files.content(file.id).read() == CONTENT
