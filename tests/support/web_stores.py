"""Stores on the web as tests need them: real servers on free ports, over a dictionary of files.

Each speaks as much of its store's protocol as reading takes. `WebStore.fails` holds statuses to
answer with before anything else, `WebStore.asked` what was asked.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

# A body in parts has no end that is known before, unless the headers tell its length.
Answer = tuple[int, dict[str, str], bytes | Iterable[bytes]]
TIME = "Wed, 25 Nov 2026 10:00:00 GMT"


@dataclass
class Asked:
    """One request. Names of headers are in small letters."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


@dataclass
class WebStore:
    """The files of a server, by path, and how it answers. `tags`: strong, weak or none."""

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    tags: str = "strong"
    fails: list[int] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    token: str | None = None  # that the header Authorization must have
    url: str = ""

    def tag_of(self, name: str) -> str:
        return hashlib.sha256(self.files[name]).hexdigest()[:16]

    def number_of(self, name: str) -> str:
        """A generation: another for each content."""
        return str(int(self.tag_of(name), 16) % 10**15)


@contextmanager
def serving(store: WebStore, answer: Callable[[WebStore, Asked], Answer]) -> Iterator[WebStore]:
    """Serve until the end of the block; `store.url` says where."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _do(self) -> None:
            parts = urlsplit(self.path)
            size = int(self.headers.get("Content-Length") or 0)
            asked = Asked(
                self.command,
                unquote(parts.path),
                {name: values[0] for name, values in parse_qs(parts.query).items()},
                {name.lower(): value for name, value in self.headers.items()},
                self.rfile.read(size),
            )
            store.asked.append(asked)
            status, headers, body = self._answer(asked)
            self.send_response(status)
            end = {"Connection": "close"}
            if isinstance(body, bytes):
                end, body = {"Content-Length": str(len(body))}, [body]
            for name, value in (end | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                with suppress(ConnectionError):  # a client may lose interest
                    for piece in body:
                        self.wfile.write(piece)

        def _answer(self, asked: Asked) -> Answer:
            if store.fails:
                return store.fails.pop(0), {}, b""
            if store.token is not None and asked.headers.get("authorization") != store.token:
                return 403, {}, b"{}"
            return answer(store, asked)

        do_GET = do_HEAD = do_POST = _do  # noqa: N815 - the library's names

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing: tests read `asked`."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            """A client that has read enough hangs up."""

    with Server(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        store.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield store
        finally:
            server.shutdown()
            thread.join()


def part(data: bytes, header: str | None, headers: dict[str, str]) -> Answer:
    """The answer with a range of bytes, or with all of them."""
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", header or "")
    if found is None:
        return 200, headers, data
    start, end = int(found[1]), min(int(found[2] or len(data)), len(data) - 1)
    if start >= len(data):
        return 416, headers | {"Content-Range": f"bytes */{len(data)}"}, b""
    place = {"Content-Range": f"bytes {start}-{end}/{len(data)}"}
    return 206, headers | place, data[start : end + 1]


# --- a plain web server -------------------------------------------------------------------------
def web(store: WebStore, asked: Asked) -> Answer:
    if asked.path.startswith("/moved/"):
        return 302, {"Location": asked.path.removeprefix("/moved")}, b""
    if asked.path not in store.files:
        return 404, {}, b""
    tag = {"strong": '"{}"', "weak": 'W/"{}"', "none": ""}[store.tags].format(
        store.tag_of(asked.path)
    )
    headers = {"Last-Modified": TIME} | ({"ETag": tag} if tag else {})
    if asked.headers.get("if-match", tag) != tag:
        return 412, headers, b""
    asked_range = asked.headers.get("range") if store.ranges else None
    return part(store.files[asked.path], asked_range, headers)


# --- Google Cloud Storage -----------------------------------------------------------------------
def google(store: WebStore, asked: Asked) -> Answer:
    found = re.fullmatch(r"(/download)?/storage/v1/b/([^/]+)(?:/o(?:/(.+))?)?", asked.path)
    assert found is not None, asked.path
    bucket, name = found[2], found[3]
    if bucket not in {path.split("/")[0] for path in store.files}:
        return 404, {}, b"{}"
    if name is None:
        return 200, {}, json.dumps(_google_list(store, bucket, asked)).encode()
    path = f"{bucket}/{name}"
    wanted = asked.query.get("generation")
    if path not in store.files or wanted not in (None, store.number_of(path)):
        return 404, {}, b"{}"
    if found[1] or asked.query.get("alt") == "media":
        return part(store.files[path], asked.headers.get("range"), {})
    return 200, {}, json.dumps(_google_object(store, path)).encode()


def _google_list(store: WebStore, bucket: str, asked: Asked) -> dict[str, Any]:
    if asked.path.endswith(bucket):
        return {"name": bucket}
    prefix, delimiter = asked.query.get("prefix", ""), asked.query.get("delimiter")
    names = [path.partition("/")[2] for path in sorted(store.files)]
    names = [name for name in names if name.startswith(prefix)]
    if delimiter is None:
        return {"items": [_google_object(store, f"{bucket}/{name}") for name in names]}
    rests = {name: name.removeprefix(prefix) for name in names}
    folders = {prefix + rest.partition("/")[0] + "/" for rest in rests.values() if "/" in rest}
    items = [_google_object(store, f"{bucket}/{n}") for n, rest in rests.items() if "/" not in rest]
    return {"items": items, "prefixes": sorted(folders)}


def _google_object(store: WebStore, path: str) -> dict[str, str]:
    bucket, _, name = path.partition("/")
    return {
        "kind": "storage#object", "bucket": bucket, "name": name,
        "size": str(len(store.files[path])), "generation": store.number_of(path),
        "updated": "2026-11-25T10:00:00.000Z", "timeCreated": "2026-11-25T10:00:00.000Z",
    }  # fmt: skip


# --- Azure Blob Storage -------------------------------------------------------------------------
def azure(store: WebStore, asked: Asked) -> Answer:
    _, _, container, *rest = [*asked.path.split("/"), ""]
    name = "/".join(rest).strip("/")
    if container not in {path.split("/")[0] for path in store.files}:
        return _azure_error(404, "ContainerNotFound")
    if not name and asked.query.get("comp") == "list":
        return 200, {"Content-Type": "application/xml"}, _azure_list(store, container, asked)
    if not name:
        return 200, _azure_headers("container"), b""
    path = f"{container}/{name}"
    if path not in store.files:
        return _azure_error(404, "BlobNotFound")
    tag = f'"{store.tag_of(path)}"'
    if asked.headers.get("if-match", tag) != tag:
        return _azure_error(412, "ConditionNotMet")
    headers = _azure_headers(store.tag_of(path))
    wanted = asked.headers.get("x-ms-range") or asked.headers.get("range")
    if asked.method == "HEAD":
        return 200, headers | {"Content-Length": str(len(store.files[path]))}, b""
    return part(store.files[path], wanted, headers)


def _azure_headers(tag: str) -> dict[str, str]:
    return {
        "ETag": f'"{tag}"', "Last-Modified": TIME, "x-ms-blob-type": "BlockBlob",
        "x-ms-creation-time": TIME, "x-ms-version": "2025-01-05", "x-ms-request-id": "1",
        "x-ms-lease-status": "unlocked", "x-ms-lease-state": "available",
        "Content-Type": "application/octet-stream",
    }  # fmt: skip


def _azure_error(status: int, code: str) -> Answer:
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>no</Message></Error>'
    return status, {"x-ms-error-code": code, "Content-Type": "application/xml"}, body.encode()


def _azure_list(store: WebStore, container: str, asked: Asked) -> bytes:
    prefix, delimiter = asked.query.get("prefix", ""), asked.query.get("delimiter")
    names = [path.partition("/")[2] for path in sorted(store.files)]
    names = [name for name in names if name.startswith(prefix)]
    folders = set()
    if delimiter is not None:
        deep = [name for name in names if "/" in name.removeprefix(prefix)]
        folders = {prefix + n.removeprefix(prefix).partition("/")[0] + "/" for n in deep}
        names = [name for name in names if name not in deep]
    blobs = "".join(
        f"<Blob><Name>{escape(name)}</Name><Properties>"
        f"<Creation-Time>{TIME}</Creation-Time><Last-Modified>{TIME}</Last-Modified>"
        f"<Etag>{store.tag_of(f'{container}/{name}')}</Etag>"
        f"<Content-Length>{len(store.files[f'{container}/{name}'])}</Content-Length>"
        "<BlobType>BlockBlob</BlobType></Properties></Blob>"
        for name in names
    ) + "".join(f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>" for name in sorted(folders))
    return (
        '<?xml version="1.0" encoding="utf-8"?><EnumerationResults ContainerName='
        f'"{container}"><Prefix>{escape(prefix)}</Prefix><Blobs>{blobs}</Blobs><NextMarker />'
        "</EnumerationResults>"
    ).encode()


# --- the Hugging Face Hub -----------------------------------------------------------------------
REPOSITORY = "datasets/owner/name"


def hub(store: WebStore, asked: Asked) -> Answer:
    """One repository with one branch; its commit follows from all of its files."""
    said = json.dumps({name: store.tag_of(name) for name in sorted(store.files)})
    commit = hashlib.sha1(said.encode()).hexdigest()
    path = asked.path.removeprefix("/api/").removeprefix("/")
    if not path.startswith(REPOSITORY):
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
    what, _, rest = path.removeprefix(REPOSITORY).strip("/").partition("/")
    if what in ("", "revision"):
        if rest not in ("", "main", commit):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        about = {"id": "owner/name", "sha": commit, "private": False, "downloads": 0, "likes": 0,
                 "tags": [], "siblings": []}  # fmt: skip
        return _json(about)
    revision, _, name = rest.partition("/")
    if revision != commit:
        return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
    if what == "paths-info":
        wanted = re.findall(r"[^&=]+=([^&]*)", unquote(asked.body.decode()))
        if asked.body.startswith(b"{"):
            wanted = json.loads(asked.body)["paths"]
        return _json([_hub_file(store, one) for one in wanted if one in store.files])
    if what == "tree":
        inside = [one for one in sorted(store.files) if one.startswith(name)]
        if inside or not name:
            return _json([_hub_file(store, one) for one in inside])
    if what == "resolve" and name in store.files:
        return part(store.files[name], asked.headers.get("range"), {"ETag": f'"{commit}"'})
    return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"


def _json(value: Any) -> Answer:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _hub_file(store: WebStore, name: str) -> dict[str, Any]:
    size = len(store.files[name])
    found = {"type": "file", "path": name, "size": size, "oid": store.tag_of(name)}
    if name.endswith(".parquet"):
        digest = hashlib.sha256(store.files[name]).hexdigest()
        found["lfs"] = {"oid": digest, "size": size, "pointerSize": 100}
    return found
