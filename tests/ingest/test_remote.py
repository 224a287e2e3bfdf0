"""Inputs from the web and from stores that are only read, over HTTP: pins, ranges, and refusals."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from ingest.making import make_spec
from pydantic import ValidationError

from specbatch.pipeline.inputs.contract import Source
from specbatch.pipeline.inputs.sources import open_source
from specbatch.pipeline.storage import remote, remote_http
from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.storage.remote import EXTRAS, reason_of, remote_objects
from specbatch.pipeline.storage.remote_contract import Found
from specbatch.schemas.errors import InputError, MissingExtraError, ObjectError
from specbatch.schemas.records import SourcePosition
from specbatch.schemas.schemes import READ_ONLY
from specbatch.schemas.spec import InputSpec, OutputSpec
from support.tls import Certificates, TlsFront
from support.web_stores import (
    REPOSITORY,
    Answer,
    Asked,
    WebStore,
    azure,
    google,
    hub,
    serving,
    web,
)

pytestmark = pytest.mark.pipeline  # starts servers

LINES = b'{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n'
KEY = base64.b64encode(b"key").decode()


def opened(uri: str, objects: Objects | None = None, **values: Any) -> Source:
    return open_source(make_spec(uri, input=values).input, objects or Objects(s3_retry_sec=1.0))


def prompts(source: Source, start: SourcePosition | None = None) -> list[Any]:
    return [row.prompt for batch in source.read(start) for row in batch.rows]


def table(rows: int = 30, group: int = 10) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"prompt": [f"p{i}" for i in range(rows)]}), sink, row_group_size=group)
    return sink.getvalue()


@pytest.fixture
def server() -> Iterator[WebStore]:
    with serving(WebStore(), web) as store:
        yield store


@pytest.fixture
def gs(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebStore]:
    with serving(WebStore(), google) as store:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.url)
        yield store


@pytest.fixture
def az(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebStore]:
    with serving(WebStore(), azure) as store:
        monkeypatch.setenv(
            "AZURE_STORAGE_CONNECTION_STRING",
            f"DefaultEndpointsProtocol=http;AccountName=account;AccountKey={KEY};"
            f"BlobEndpoint={store.url}/account;",
        )
        yield store


@pytest.fixture
def hf(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebStore]:
    with serving(WebStore(), hub) as store:
        monkeypatch.setenv("HF_ENDPOINT", store.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield store


# Where a store's files are: what a uri begins with, and what the server calls it.
PLACES = {
    "gs": ("gs://bucket/", "bucket/"),
    "az": ("az://bucket/", "bucket/"),
    "hf": (f"hf://{REPOSITORY}/", ""),
    "server": ("", "/"),
}
STORES = list(PLACES)
LISTED = [name for name in STORES if name != "server"]


@pytest.fixture
def place(request: pytest.FixtureRequest) -> tuple[WebStore, str, str]:
    """A store, what its uris begin with, and what its names begin with."""
    store = request.getfixturevalue(request.param)
    uri, name = PLACES[request.param]
    return store, uri or f"{store.url}/", name


every = pytest.mark.parametrize("place", STORES, indirect=True)
listed = pytest.mark.parametrize("place", LISTED, indirect=True)


# --- what all of them do --------------------------------------------------------------------------
@every
def test_files_are_read_and_resumed(place: tuple[WebStore, str, str]) -> None:
    store, uri, name = place
    store.files |= {f"{name}in/a.jsonl": LINES, f"{name}in/b.parquet": table()}
    lines, columns = opened(f"{uri}in/a.jsonl"), opened(f"{uri}in/b.parquet")
    columns.check()
    assert prompts(lines) == ["a", "b", "c"]
    assert prompts(columns) == [f"p{i}" for i in range(30)]
    (batch,) = lines.read()
    assert prompts(opened(f"{uri}in/a.jsonl"), batch.position(2)) == ["c"]
    cursor = list(columns.read())[1].position(3)
    assert prompts(opened(f"{uri}in/b.parquet"), cursor) == [f"p{i}" for i in range(13, 30)]


@every
def test_a_file_that_changed_is_not_read_on(place: tuple[WebStore, str, str]) -> None:
    """Also if it has the size and the time that it had."""
    store, uri, name = place
    store.files[f"{name}a.jsonl"] = LINES
    source = opened(f"{uri}a.jsonl")
    (batch,) = source.read()
    store.files[f"{name}a.jsonl"] = LINES.replace(b"c", b"d")
    with pytest.raises(InputError, match="changed since this job began"):
        prompts(opened(f"{uri}a.jsonl"), batch.position(1))
    with pytest.raises(InputError, match="changed while it was being read"):
        prompts(source)


@every
def test_a_range_of_a_version_that_is_gone_is_refused(
    place: tuple[WebStore, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No part of the new file is ever taken for one of the old."""
    monkeypatch.setattr("specbatch.pipeline.storage.ranged.READ_AHEAD_BYTES", 1000)
    store, uri, name = place
    store.files[f"{name}a.bin"] = bytes(10_000)
    with Objects(s3_retry_sec=1.0).open(f"{uri}a.bin") as file:
        assert file.read(500) == bytes(500)
        store.files[f"{name}a.bin"] = b"1" * 10_000
        if name == "":  # a repository keeps its commits; this one forgets them
            store.fails.append(404)
        with pytest.raises(ObjectError, match=r"changed while it was being read|no such|404"):
            file.read(5000)


@every
def test_large_files_are_read_in_ranges(place: tuple[WebStore, str, str]) -> None:
    store, uri, name = place
    store.files[f"{name}a.bin"] = data = os.urandom(9 << 20)
    with Objects().open(f"{uri}a.bin") as file:
        file.seek(5 << 20)
        store.asked.clear()
        assert file.read(100) == data[5 << 20 : (5 << 20) + 100]
        assert len(store.asked) == 1
        file.seek(0)
        store.asked.clear()
        assert hashlib.sha256(file.read()).digest() == hashlib.sha256(data).digest()
        assert len(store.asked) == 3


@every
def test_what_is_not_there_is_named(place: tuple[WebStore, str, str]) -> None:
    store, uri, name = place
    store.files[f"{name}other.jsonl"] = LINES
    with pytest.raises(InputError, match=r"none\.jsonl does not exist"):
        opened(f"{uri}none.jsonl")
    assert Objects().head(f"{uri}none.jsonl") is None


# Azure's library waits 15 seconds before it asks again.
@pytest.mark.parametrize("place", [name for name in STORES if name != "az"], indirect=True)
def test_a_failure_that_passes_is_tried_again(place: tuple[WebStore, str, str]) -> None:
    store, uri, name = place
    store.files[f"{name}a.jsonl"] = LINES
    store.fails += [503]
    assert prompts(opened(f"{uri}a.jsonl", Objects(s3_retry_sec=30.0))) == ["a", "b", "c"]
    assert not store.fails


@every
def test_denied_access_says_what_to_set(place: tuple[WebStore, str, str]) -> None:
    store, uri, name = place
    store.files[f"{name}a.jsonl"] = LINES
    store.token = "nobody has it"
    with pytest.raises(InputError, match=r"denied access \(403\); (set|put) ") as caught:
        opened(f"{uri}a.jsonl")
    assert KEY not in str(caught.value)


@every
def test_nothing_is_written_there(place: tuple[WebStore, str, str], tmp_path: Path) -> None:
    _, uri, _ = place
    objects = Objects()
    for write in (
        lambda: objects.put_bytes(f"{uri}x", b""),
        lambda: objects.put_file(f"{uri}x", tmp_path),
        lambda: objects.put_new(f"{uri}x", b""),
        lambda: objects.delete(f"{uri}x"),
    ):
        with pytest.raises(ObjectError, match="is read only; use s3://"):
            write()
    objects.abort_uploads(uri)
    with pytest.raises(ValidationError, match="is for inputs alone: use a folder or s3://"):
        OutputSpec(uri=f"{uri}out")


@listed
def test_folders_and_globs_are_read_in_order(place: tuple[WebStore, str, str]) -> None:
    store, uri, name = place
    for file in ("in/b", "in/a", "in/deep/c", "in/_x", "other/d"):
        store.files[f"{name}{file}.jsonl"] = orjson.dumps({"prompt": file})
    assert prompts(opened(f"{uri}in")) == ["in/a", "in/b", "in/deep/c"]
    assert prompts(opened(f"{uri}in/")) == prompts(opened(f"{uri}in"))
    assert prompts(opened(f"{uri}*/[ad].jsonl")) == ["in/a", "other/d"]
    whole = opened(uri.rstrip("/"))
    assert prompts(whole) == ["in/a", "in/b", "in/deep/c", "other/d"]
    with pytest.raises(InputError, match="no file matches"):
        opened(f"{uri}in/z*.jsonl")


@listed
def test_a_saved_dataset_is_read_from_a_store(
    place: tuple[WebStore, str, str], tmp_path: Path
) -> None:
    store, uri, name = place
    Dataset.from_dict({"prompt": ["a", "b", "c"]}).save_to_disk(tmp_path / "d", num_shards=2)
    for path in (tmp_path / "d").iterdir():
        store.files[f"{name}d/{path.name}"] = path.read_bytes()
    assert prompts(opened(f"{uri}d")) == ["a", "b", "c"]


# --- the web --------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("tags", ["strong", "weak", "none"])
def test_a_server_may_have_neither_ranges_nor_tags(
    server: WebStore, ranges: bool, tags: str, tmp_path: Path
) -> None:
    """Then the version is a digest, and a time alone is none."""
    server.ranges, server.tags = ranges, tags
    server.files["/a.parquet"] = data = table()
    uri = f"{server.url}/a.parquet"
    objects = Objects(scratch=tmp_path)
    source = opened(uri, objects)
    source.check()
    assert prompts(source) == [f"p{i}" for i in range(30)]
    digest = f"sha256-{hashlib.sha256(data).hexdigest()}"
    strong = server.tag_of("/a.parquet")
    assert source.files[0].version == (strong if tags == "strong" else digest)
    cursor = list(source.read())[1].position(3)
    assert len(prompts(opened(uri), cursor)) == 17
    server.files["/a.parquet"] = data[:50] + b"!" + data[51:]
    with pytest.raises(InputError, match="changed since this job began"):
        prompts(opened(uri), cursor)
    assert not list(tmp_path.iterdir())


def found_by(reader: remote_http.HttpRemote, uri: str) -> Found:
    found = reader.look(uri)
    assert found is not None
    return found


def test_a_copy_serves_all_readers_and_the_oldest_goes(
    server: WebStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_http, "MOST_COPIES", 2)
    server.tags = "none"
    for name in "abc":
        server.files[f"/{name}.jsonl"] = LINES
    objects = Objects()
    infos = [objects.head(f"{server.url}/{name}.jsonl") for name in "abc"]
    reader = remote_http.HttpRemote()
    found = found_by(reader, f"{server.url}/c.jsonl")
    server.asked.clear()
    assert reader.read(f"{server.url}/c.jsonl", found, 2, 6) == b"prompt"
    assert reader.read(f"{server.url}/c.jsonl", found, 0, 1) == b"{"
    assert not server.asked
    for name in "abcabc":
        with objects.open(f"{server.url}/{name}.jsonl", infos["abc".index(name)].version) as file:  # type: ignore[union-attr] # it is there
            assert file.read() == LINES


def test_a_version_that_is_kept_is_not_copied_again(server: WebStore) -> None:
    server.ranges, server.files["/a.jsonl"] = False, LINES
    reader, uri = remote_http.HttpRemote(), f"{server.url}/a.jsonl"
    first, second = found_by(reader, uri), found_by(reader, uri)
    assert first.copy is second.copy is not None
    server.files["/a.jsonl"] = LINES * 2
    third = found_by(reader, uri)
    assert third.copy is not first.copy
    assert reader.read(uri, third, 0, third.size) == LINES * 2
    assert reader.read(uri, first, 0, first.size) == LINES


def test_an_open_file_keeps_its_copy(
    server: WebStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also when other files are read, and when the server's changes."""
    monkeypatch.setattr(remote_http, "MOST_COPIES", 1)
    server.ranges, server.tags = False, "none"
    server.files |= {"/a.jsonl": LINES, "/b.jsonl": LINES}
    objects = Objects(scratch=tmp_path)
    with objects.open(f"{server.url}/a.jsonl") as file:
        assert objects.head(f"{server.url}/b.jsonl") is not None
        server.files["/a.jsonl"] = b"other"
        server.asked.clear()
        assert file.read() == LINES
        assert not server.asked


def test_an_answer_without_end_is_not_copied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(remote_http, "MOST_COPY_BYTES", 1 << 20)
    with (
        serving(WebStore(), lambda *_: (200, {}, repeat(bytes(1 << 16), 64))) as store,
        pytest.raises(InputError, match="a copy of the file would have more than 1,048,576 b"),
    ):
        opened(f"{store.url}/a.jsonl", Objects(scratch=tmp_path))


def test_a_file_that_is_said_to_be_too_large_is_not_begun(tmp_path: Path) -> None:
    said = {"Content-Length": str(1 << 40)}
    with (
        serving(WebStore(), lambda *_: (200, said, [b"x"])) as store,
        pytest.raises(InputError, match="would have more than 68,719,476,736 bytes"),
    ):
        opened(f"{store.url}/a.jsonl", Objects(scratch=tmp_path))


def test_a_copy_leaves_space_on_the_disk(
    server: WebStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server.ranges = False
    server.files |= {"/fits.jsonl": LINES, "/larger.jsonl": LINES + b"\n"}
    for total, spare in ((100 << 30, 1 << 30), (20 << 20, 1 << 20), (0, -len(LINES))):
        disk = SimpleNamespace(total=total, free=spare + len(LINES))
        monkeypatch.setattr(shutil, "disk_usage", lambda _, disk=disk: disk)
        objects = Objects(scratch=tmp_path)
        assert prompts(opened(f"{server.url}/fits.jsonl", objects)) == ["a", "b", "c"]
        if total:
            with pytest.raises(InputError, match=rf"{tmp_path} has no space for a copy of the fil"):
                opened(f"{server.url}/larger.jsonl", objects)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_server_that_sends_byte_by_byte_is_left(
    ranges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_http, "PACE_SEC", 0.2)
    pause = threading.Event()

    def slowly(body: bytes) -> Iterator[bytes]:
        for at in range(len(body)):
            yield body[at : at + 1]
            pause.wait(0.01)

    def slow(store: WebStore, asked: Asked) -> Answer:
        status, headers, body = web(store, asked)
        assert isinstance(body, bytes)
        return status, headers | {"Content-Length": str(len(body))}, slowly(body)

    with (
        serving(WebStore({"/a.jsonl": LINES * 10}, ranges), slow) as store,
        pytest.raises(ObjectError, match=r"less than 262,144 bytes in 0\.2 sec") as caught,
    ):
        prompts(opened(f"{store.url}/a.jsonl"))
    assert caught.value.passing


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_file_may_come_in_chunks_of_unknown_number(is_whole: bool) -> None:
    pieces = [b"%x\r\n%b\r\n" % (len(line), line) for line in LINES.splitlines(keepends=True)]
    end = [b"0\r\n\r\n"] if is_whole else []
    chunked = {"Transfer-Encoding": "chunked"}
    with serving(WebStore(), lambda *_: (200, chunked, [*pieces, *end])) as store:
        uri, objects = f"{store.url}/a.jsonl", Objects(s3_retry_sec=0.1)
        if is_whole:
            assert prompts(opened(uri, objects)) == ["a", "b", "c"]
            return
        with pytest.raises(ObjectError, match="the server cannot be reached") as caught:
            opened(uri, objects)
    assert caught.value.passing


@pytest.mark.parametrize("tags", ["weak", "none"])
def test_a_range_without_its_tag_may_be_of_another_file(tags: str) -> None:
    def careless(store: WebStore, asked: Asked) -> Answer:
        asked.headers.pop("if-match", None)
        return web(store, asked)

    with (
        serving(WebStore({"/a.jsonl": LINES}), careless) as store,
        Objects().open(f"{store.url}/a.jsonl") as file,
    ):
        store.tags, store.files["/a.jsonl"] = tags, LINES.replace(b"c", b"d")
        with pytest.raises(ObjectError, match="changed while it was being read"):
            file.read()


def test_an_empty_file_is_a_file(server: WebStore) -> None:
    for tags in ("strong", "none"):
        server.tags, server.files["/a.jsonl"] = tags, b""
        info = Objects().head(f"{server.url}/a.jsonl")
        assert info is not None
        assert info.size == 0
        assert prompts(opened(f"{server.url}/a.jsonl")) == []


def test_redirects_are_followed(server: WebStore) -> None:
    server.files["/a.jsonl"] = LINES
    assert prompts(opened(f"{server.url}/moved/a.jsonl")) == ["a", "b", "c"]
    assert prompts(opened(f"{server.url}{'/moved' * 8}/a.jsonl")) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("/a.jsonl?sig=hidden", "it is redirected more than 8 times"),
        (
            "ftp://host/a.jsonl?sig=hidden",
            "it is redirected to something that is not a web address",
        ),
        (
            "http://[host/a.jsonl?sig=hidden",
            "it is redirected to something that is not a web address",
        ),
    ],
)
def test_an_error_does_not_quote_where_a_redirect_leads(location: str, words: str) -> None:
    with (
        serving(WebStore(), lambda *_: (302, {"Location": location}, b"")) as store,
        pytest.raises(InputError, match=words) as caught,
    ):
        opened(f"{store.url}/a.jsonl")
    assert "hidden" not in str(caught.value)


def test_the_body_of_a_redirect_is_not_read_to_its_end() -> None:
    ended = threading.Event()

    def body() -> Iterator[bytes]:
        yield from repeat(bytes(1 << 20), 64)
        ended.set()

    def moved(store: WebStore, asked: Asked) -> Answer:
        status, headers, data = web(store, asked)
        return status, headers, body() if status == 302 else data

    with serving(WebStore({"/a.jsonl": LINES}), moved) as store:
        assert prompts(opened(f"{store.url}/moved/a.jsonl")) == ["a", "b", "c"]
    assert not ended.is_set()


def test_a_password_is_not_sent_on_to_another_host(
    server: WebStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    path.chmod(0o600)
    monkeypatch.setenv("NETRC", str(path))
    server.files["/a.jsonl"] = LINES
    leads = {"Location": f"{server.url}/a.jsonl"}
    with serving(WebStore(), lambda *_: (302, leads, b"")) as other:
        assert prompts(opened(f"{other.url}/a.jsonl")) == ["a", "b", "c"]
    assert all("authorization" in asked.headers for asked in other.asked)
    assert not any("authorization" in asked.headers for asked in server.asked)
    server.asked.clear()
    assert prompts(opened(f"{server.url}/moved/a.jsonl")) == ["a", "b", "c"]
    assert all("authorization" in asked.headers for asked in server.asked)


@pytest.fixture
def secure(
    server: WebStore, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[TlsFront, Certificates]]:
    """`server` through TLS, with a certificate that nobody trusts."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    port = int(server.url.rpartition(":")[2])
    with Certificates.made() as certificates, TlsFront(certificates, port) as front:
        yield front, certificates


def test_a_certificate_must_be_trusted(
    server: WebStore, secure: tuple[TlsFront, Certificates], monkeypatch: pytest.MonkeyPatch
) -> None:
    front, certificates = secure
    server.files["/a.jsonl"] = LINES
    with pytest.raises(InputError, match="the certificate of the server is not trusted; set SSL_"):
        opened(f"{front.url}/a.jsonl", Objects(s3_retry_sec=30.0))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
    assert prompts(opened(f"{front.url}/a.jsonl")) == ["a", "b", "c"]


def test_a_handshake_that_is_cut_may_succeed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    def cut(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=cut, args=(listener,), daemon=True)
        thread.start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ObjectError, match="the server cannot be reached") as caught:
            opened(f"{url}/a.jsonl", Objects(s3_retry_sec=0.1))
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert caught.value.passing


def test_no_step_of_a_secure_address_may_be_unsafe(
    secure: tuple[TlsFront, Certificates], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if the last one is safe."""
    leads: dict[str, str] = {}

    def answer(store: WebStore, asked: Asked) -> Answer:
        if asked.path in leads:
            return 302, {"Location": leads[asked.path]}, b""
        return web(store, asked)

    _, certificates = secure
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
    with (
        serving(WebStore({"/c.jsonl": LINES}), answer) as store,
        TlsFront(certificates, int(store.url.rpartition(":")[2])) as front,
    ):
        leads |= {"/a.jsonl": f"{store.url}/b.jsonl", "/b.jsonl": f"{front.url}/c.jsonl"}
        assert prompts(opened(f"{store.url}/b.jsonl")) == ["a", "b", "c"]
        store.asked.clear()
        with pytest.raises(InputError, match="it leads to http://, which is not safe"):
            opened(f"{front.url}/a.jsonl")
        assert [asked.path for asked in store.asked] == ["/a.jsonl"]


def test_login_and_password_come_from_the_netrc_file(
    server: WebStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["/a.jsonl"] = LINES
    server.token = f"Basic {base64.b64encode(b'me:secret').decode()}"
    path = tmp_path / "netrc"
    path.write_text("machine 127.0.0.1 login me password secret\n")
    path.chmod(0o600)
    monkeypatch.setenv("NETRC", str(path))
    assert prompts(opened(f"{server.url}/a.jsonl")) == ["a", "b", "c"]
    path.write_text("machine 127.0.0.1 login me password of hidden words\n")
    with pytest.raises(InputError, match=rf"cannot read {path}: line \d is not as in") as caught:
        opened(f"{server.url}/a.jsonl")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        *("https://host/a.csv?sig=x", "http://host/a.csv#x", "HTTPS://host/a.csv?sig=x"),
        *("az://bucket/a.csv?sv=1&sig=x", "abfs://bucket/a.csv?sig=x", "AZ://bucket/a?sig=x"),
        *("gs://bucket/a.csv?X-Goog-Signature=x", "hf://datasets/owner/name/a.csv?token=x"),
    ],
)
def test_an_address_with_a_query_is_refused(uri: str) -> None:
    with pytest.raises(ValidationError, match="it may hold a signature"):
        InputSpec(uri=uri)


@pytest.mark.parametrize(
    "uri", ["gs://bucket/day=2?/a?.csv", "az://b/?/x=1", "hf://datasets/o/n/??.csv", "a?b=c.csv"]
)
def test_a_glob_is_no_query(uri: str) -> None:
    assert InputSpec(uri=uri).uri == uri


def test_the_account_of_a_uri_for_azure_belongs_in_the_environment() -> None:
    with pytest.raises(ValidationError, match="write az://CONTAINER/PATH and set AZURE_STORAGE_AC"):
        InputSpec(uri="abfs://container@account.dfs.core.windows.net/path")


@pytest.mark.parametrize("status", [500, 502, 503, 429, 408])
def test_a_failure_that_lasts_may_pass_later(server: WebStore, status: int) -> None:
    server.fails += [status] * 1000
    with pytest.raises(ObjectError, match=rf"the server answered {status}") as caught:
        opened(f"{server.url}/a.jsonl", Objects(s3_retry_sec=0.1))
    assert not isinstance(caught.value, InputError)
    assert caught.value.passing


def test_a_server_that_says_when_to_come_back_may_answer_later() -> None:
    with (
        serving(WebStore(), lambda *_: (503, {"Retry-After": "1"}, b"")) as store,
        pytest.raises(ObjectError, match=r"the server answered 503") as caught,
    ):
        opened(f"{store.url}/a.jsonl", Objects(s3_retry_sec=0.1))
    assert caught.value.passing


def test_a_server_that_is_gone_may_come_back() -> None:
    with serving(WebStore(), web) as store:
        url = store.url
    with pytest.raises(ObjectError, match="the server cannot be reached") as caught:
        opened(f"{url}/a.jsonl", Objects(s3_retry_sec=0.1))
    assert caught.value.passing


@pytest.mark.parametrize("status", [400, 405, 501])
def test_a_refusal_does_not_pass(server: WebStore, status: int) -> None:
    server.fails += [status] * 1000
    with pytest.raises(InputError, match=rf"the server answered {status}"):
        opened(f"{server.url}/a.jsonl", Objects(s3_retry_sec=30.0))


def test_an_answer_that_is_cut_short_is_not_taken(server: WebStore) -> None:
    server.files["/a.jsonl"] = LINES
    objects = Objects(s3_retry_sec=0.1)
    with objects.open(f"{server.url}/a.jsonl") as file:
        info = objects.head(f"{server.url}/a.jsonl")
        assert info is not None
        tag, server.files["/a.jsonl"] = info.version, LINES[:20]
        server.tag_of = lambda _: tag  # type: ignore[method-assign] # a server that lies
        with pytest.raises(ObjectError, match="sent other bytes than were asked for"):
            file.read()


# --- Google Cloud Storage -------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["a?b.jsonl", "a#b.jsonl", "a?b#c.jsonl"])
def test_a_name_may_hold_signs_that_mean_something_in_urls(gs: WebStore, name: str) -> None:
    gs.files |= {"bucket/a": b"another file", f"bucket/{name}": LINES}
    assert prompts(opened(f"gs://bucket/{name}")) == ["a", "b", "c"]


# --- the Hub --------------------------------------------------------------------------------------
def test_commits_to_other_files_change_nothing(hf: WebStore) -> None:
    hf.files |= {"a.jsonl": LINES, "b.parquet": table()}
    uris = [f"hf://{REPOSITORY}/{name}" for name in hf.files]
    before = [opened(uri).files[0].version for uri in uris]
    assert before[1] == hashlib.sha256(hf.files["b.parquet"]).hexdigest()
    hf.files["README.md"] = b"new"
    assert [opened(uri).files[0].version for uri in uris] == before


def test_a_revision_can_be_named_and_must_exist(hf: WebStore) -> None:
    hf.files["a.jsonl"] = LINES
    assert prompts(opened(f"hf://{REPOSITORY}@main/a.jsonl")) == ["a", "b", "c"]
    source = opened(f"hf://{REPOSITORY}@main")
    assert source.files[0].uri == f"hf://{REPOSITORY}@main/a.jsonl"
    assert prompts(source) == ["a", "b", "c"]
    for uri in (f"hf://{REPOSITORY}@other/a.jsonl", "hf://datasets/owner/none/a.jsonl"):
        with pytest.raises(InputError, match="no such repository or revision, or keeps it from"):
            opened(uri)
    with pytest.raises(InputError, match="it looks like hf://datasets/OWNER/NAME/FILE"):
        opened("hf://datasets/name")
    with pytest.raises(InputError, match="buckets of the Hub are not read"):
        opened("hf://buckets/owner/name/a.jsonl")


def test_bytes_are_asked_for_as_they_are(hf: WebStore) -> None:
    """A range of compressed bytes would be another range."""
    hf.files["a.jsonl"] = LINES
    assert prompts(opened(f"hf://{REPOSITORY}/a.jsonl")) == ["a", "b", "c"]
    ranges = [asked for asked in hf.asked if "range" in asked.headers]
    assert ranges
    assert {asked.headers["accept-encoding"] for asked in ranges} == {"identity"}


def test_a_folder_that_is_not_there_is_named(hf: WebStore) -> None:
    hf.files["a.jsonl"] = LINES
    with pytest.raises(InputError, match="none/ does not exist or is empty"):
        opened(f"hf://{REPOSITORY}/none/")
    with pytest.raises(InputError, match="no file matches"):
        opened(f"hf://{REPOSITORY}/none/*.jsonl")


def test_offline_is_named(hf: WebStore, monkeypatch: pytest.MonkeyPatch) -> None:
    hf.files["a.jsonl"] = LINES
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="HF_HUB_OFFLINE is set; unset it"):
        opened(f"hf://{REPOSITORY}/a.jsonl")


# --- packages and errors --------------------------------------------------------------------------
def test_every_scheme_that_is_read_only_has_an_extra() -> None:
    assert tuple(EXTRAS) == READ_ONLY


@pytest.mark.parametrize("scheme", EXTRAS)
def test_a_missing_package_names_its_extra(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "find_spec", lambda _: None)
    extra, packages = EXTRAS[scheme]
    with pytest.raises(
        MissingExtraError,
        match=rf"{scheme}:// needs {packages[0]}: pip install 'specbatch\[{extra}\]'",
    ):
        remote_objects(scheme, 1.0, None)


class _AnsweredError(Exception):
    """An error of some library that knows the store's answer."""

    def __init__(self, **said: Any) -> None:
        super().__init__("no")
        self.__dict__ |= said


def test_the_status_is_found_wherever_a_library_keeps_it() -> None:
    for error, status in {
        _AnsweredError(status=503): 503,
        _AnsweredError(code="429"): 429,
        _AnsweredError(status_code=404): 404,
        _AnsweredError(response=_AnsweredError(status_code=500)): 500,
        OSError("Forbidden: https://x"): 403,
        PermissionError(): 403,
        _AnsweredError(code="BlobNotFound"): None,
        ValueError("x"): None,
    }.items():
        assert remote.status_of(error) == status
    outer = ValueError("outer")
    outer.__cause__ = _AnsweredError(status=502)
    assert remote.is_transient(outer)


def test_a_certificate_that_is_not_trusted_does_not_pass() -> None:
    error = type("MaxRetryError", (Exception,), {})("x")
    error.reason = ssl.SSLCertVerificationError("certificate verify failed")
    assert not remote.is_transient(error)
    assert "set SSL_CERT_FILE" in reason_of(error, remote_http.HttpRemote())
    error.reason = ssl.SSLEOFError("EOF occurred in violation of protocol")
    assert remote.is_transient(error)
    assert "cannot be reached" in reason_of(error, remote_http.HttpRemote())
    none = type("DefaultCredentialsError", (Exception,), {})("x")
    assert "no credentials for the server found" in reason_of(none, remote_http.HttpRemote())
