"""`http://` and `https://`, through urllib3.

The version of a file is its strong ETag, and every range asks for it. If the server sends none, or
no ranges, the file is copied whole to a temporary file first; its version is then its ETag or the
SHA-256 of its bytes. Login and password come from the file that `NETRC` names (`~/.netrc`).
"""

from __future__ import annotations

import hashlib
import netrc
import os
import re
import tempfile
import threading
import weakref
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3

from specbatch.pipeline.storage.object_store import explained
from specbatch.pipeline.storage.remote_contract import Found, VersionGoneError
from specbatch.schemas.errors import ObjectError

ANSWER_SEC = 60.0
CONNECT_SEC = 10.0
MOST_COPIES = 4
CHUNK_BYTES = 1 << 20
_MOST_REDIRECTS = 8
_DIGEST = "sha256-"
_EMPTY = Found(0, _DIGEST + hashlib.sha256().hexdigest())
_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+)")  # of the header Content-Range


class HttpStatusError(Exception):
    """The server answered with an error."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the server answered {status}")
        self.status = status


class HttpRemote:
    """Thread-safe; each process makes its connections at first use, never before a fork."""

    name = "the server"
    remedy = "put login and password of its host into the file that NETRC names (~/.netrc)"

    def __init__(self, scratch: Path | None = None) -> None:
        self._scratch = scratch
        self._pools: dict[tuple[int, str | None], urllib3.PoolManager] = {}  # by process and proxy
        self._copies: dict[str, _Copy] = {}
        self._lock = threading.Lock()

    def look(self, uri: str) -> Found | None:
        with self._get(uri, {"Range": "bytes=0-0"}) as answer:
            if answer.status in (404, 410):
                return None
            place, tag = _content_range(answer), _etag(answer)
            if answer.status == 416 and place == (0, 0):
                return _EMPTY if tag is None else Found(0, tag)
            if answer.status == 200:
                return self._copy(uri, answer).found
            if answer.status != 206 or place is None:
                raise HttpStatusError(answer.status)
            if tag is not None:
                return Found(place[1], tag)
        return self._fetch(uri).found

    def find(self, folder: str) -> NoReturn:
        raise ObjectError(
            f"{folder.rstrip('/')} does not exist; name a file: a web server lists no folders"
        )

    def read(self, uri: str, version: str, start: int, size: int) -> bytes:
        copy = self._copies.get(uri)
        if copy is not None and copy.found.version == version:
            return copy.read(start, size)
        if version.startswith(_DIGEST):
            copy = self._fetch(uri)
        else:
            part = self._range(uri, version, start, size)
            if isinstance(part, bytes):
                return part
            copy = part
        if copy.found.version != version:
            raise VersionGoneError
        return copy.read(start, size)

    def _range(self, uri: str, version: str, start: int, size: int) -> bytes | _Copy:
        """A part of a version; a copy if the server sends all of it."""
        asked = {"Range": f"bytes={start}-{start + size - 1}", "If-Match": f'"{version}"'}
        with self._get(uri, asked) as answer:
            if answer.status in (404, 410, 412, 416):
                raise VersionGoneError
            if answer.status == 200:
                return self._copy(uri, answer)
            if answer.status != 206:
                raise HttpStatusError(answer.status)
            if _etag(answer) not in (None, version):
                raise VersionGoneError
            data = answer.read(size + 1)
            place = _content_range(answer)
        if len(data) != size or place is None or place[0] != start:
            raise ObjectError(
                f"cannot read {uri}: the server sent other bytes than were asked for; a proxy on "
                "the way may cut answers short"
            )
        return data

    def _fetch(self, uri: str) -> _Copy:
        with self._get(uri, {}) as answer:
            if answer.status in (404, 410):
                raise VersionGoneError
            if answer.status != 200:
                raise HttpStatusError(answer.status)
            return self._copy(uri, answer)

    def _copy(self, uri: str, answer: urllib3.BaseHTTPResponse) -> _Copy:
        """Keep a copy of an answer's body; the oldest of too many goes."""
        copy = _Copy(answer, self._scratch)
        with self._lock:
            self._copies.pop(uri, None)
            while len(self._copies) >= MOST_COPIES:
                self._copies.pop(next(iter(self._copies)))
            self._copies[uri] = copy
        return copy

    @contextmanager
    def _get(self, uri: str, headers: Mapping[str, str]) -> Iterator[urllib3.BaseHTTPResponse]:
        answer = self._pool(uri).request(
            "GET",
            uri,
            headers={"Accept-Encoding": "identity", **_authorization(uri), **headers},
            preload_content=False,
            decode_content=False,
            timeout=urllib3.Timeout(connect=CONNECT_SEC, read=ANSWER_SEC),
            # We try again ourselves, with a time limit.
            retries=urllib3.Retry(
                _MOST_REDIRECTS, connect=0, read=0, redirect=_MOST_REDIRECTS, status=0, other=0
            ),
        )
        try:
            if uri.startswith("https:") and (answer.geturl() or "").startswith("http:"):
                raise ObjectError(f"cannot read {uri}: it leads to http://, which is not safe")
            yield answer
        finally:
            answer.close()

    def _pool(self, uri: str) -> urllib3.PoolManager:
        parts = urlsplit(uri)
        proxy = None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)
        with self._lock:
            key = (os.getpid(), proxy)
            if key not in self._pools:
                self._pools[key] = urllib3.ProxyManager(proxy) if proxy else urllib3.PoolManager()
            return self._pools[key]


class _Copy:
    """All bytes of an answer, in a file that has no name and goes with the last reader."""

    def __init__(self, answer: urllib3.BaseHTTPResponse, scratch: Path | None) -> None:
        digest, size = hashlib.sha256(), 0
        folder = scratch or Path(tempfile.gettempdir())
        with explained("write", str(folder)):
            folder.mkdir(parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by the next line
        with file:
            for chunk in answer.stream(CHUNK_BYTES, decode_content=False):
                digest.update(chunk)
                size += len(chunk)
                with explained("write", str(folder)):
                    file.write(chunk)
            with explained("write", str(folder)):
                file.flush()
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self.found = Found(size, _etag(answer) or _DIGEST + digest.hexdigest())

    def read(self, start: int, size: int) -> bytes:
        return os.pread(self._file, size, start)


def _etag(answer: urllib3.BaseHTTPResponse) -> str | None:
    """The ETag, unless it is weak: then other bytes may have it too."""
    tag = answer.headers.get("ETag", "")
    return tag[1:-1] if len(tag) > 2 and tag[0] == tag[-1] == '"' else None


def _content_range(answer: urllib3.BaseHTTPResponse) -> tuple[int, int] | None:
    """(first byte, bytes of the whole file), None if the answer does not say."""
    found = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    return None if found is None else (int(found[1] or 0), int(found[2]))


def _authorization(uri: str) -> dict[str, str]:
    """The header for a host that the netrc file has. It is not sent on to another host."""
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    if not path.is_file():
        return {}
    try:
        known = netrc.netrc(path).authenticators(urlsplit(uri).hostname or "")
    except (netrc.NetrcParseError, OSError) as error:
        raise ObjectError(f"cannot read {path}: {error}") from error
    if known is None:
        return {}
    user, _, password = known
    return {"Authorization": f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"}
