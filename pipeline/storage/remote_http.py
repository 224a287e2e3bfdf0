"""`http://` and `https://`, through urllib3.

The version of a file is its strong ETag, and every range asks for it. If the server sends none, or
no ranges, the file is copied whole to a temporary file first; its version is then its ETag or the
SHA-256 of its bytes. Login and password come from the file that `NETRC` names (`~/.netrc`).

A server is not trusted: bodies have limits of size and pace, and no error quotes where it leads.
"""

from __future__ import annotations

import hashlib
import netrc
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn
from urllib.parse import urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3.exceptions import HTTPError
from urllib3.util import parse_url

from specbatch.pipeline.storage.object_store import explained
from specbatch.pipeline.storage.remote_contract import Copy, Found, VersionGoneError
from specbatch.schemas.errors import ObjectError

ANSWER_SEC = 60.0
CONNECT_SEC = 10.0
MOST_COPIES = 4
MOST_COPY_BYTES = 64 << 30
MOST_SPARE_BYTES = 1 << 30  # what copies leave free, or a twentieth of a small disk
CHUNK_BYTES = 1 << 18
PACE_BYTES, PACE_SEC = 1 << 18, 60.0  # a body brings so much in this time, or it ends
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
                return self._copy(uri, answer).found()
            if answer.status != 206 or place is None:
                raise HttpStatusError(answer.status)
            if tag is not None:
                return Found(place[1], tag)
        return self._fetch(uri).found()

    def find(self, folder: str) -> NoReturn:
        raise ObjectError(
            f"{folder.rstrip('/')} does not exist; name a file: a web server lists no folders"
        )

    def read(self, uri: str, found: Found, start: int, size: int) -> bytes:
        copy: Copy | None = found.copy or self._kept(uri, found.version)
        if copy is None:
            part = self._range(uri, found.version, start, size)
            if isinstance(part, bytes):
                return part
            if part.version != found.version:
                raise VersionGoneError
            copy = part
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
            if _etag(answer) != version:
                raise VersionGoneError
            place, data = _content_range(answer), bytearray()
            for chunk in _body(uri, answer):
                data += chunk
                if len(data) > size:
                    break
        if len(data) != size or place is None or place[0] != start:
            raise ObjectError(
                f"cannot read {uri}: the server sent other bytes than were asked for; a proxy on "
                "the way may cut answers short"
            )
        return bytes(data)

    def _fetch(self, uri: str) -> _Copy:
        with self._get(uri, {}) as answer:
            if answer.status in (404, 410):
                raise VersionGoneError
            if answer.status != 200:
                raise HttpStatusError(answer.status)
            return self._copy(uri, answer)

    def _copy(self, uri: str, answer: urllib3.BaseHTTPResponse) -> _Copy:
        """Keep a copy of an answer's body; of too many goes the one that was longest unused.

        A version that is kept is not copied again.
        """
        tag = _etag(answer)
        copy = None if tag is None else self._kept(uri, tag)
        if copy is None:
            copy = _Copy(uri, answer, self._scratch)
        with self._lock:
            self._copies.pop(uri, None)
            while len(self._copies) >= MOST_COPIES:
                self._copies.pop(next(iter(self._copies)))
            self._copies[uri] = copy
        return copy

    def _kept(self, uri: str, version: str) -> _Copy | None:
        copy = self._copies.get(uri)
        return copy if copy is not None and copy.version == version else None

    @contextmanager
    def _get(self, uri: str, headers: Mapping[str, str]) -> Iterator[urllib3.BaseHTTPResponse]:
        """Follow redirects to the answer. urllib3 would read their bodies, however long."""
        place, login = uri, _authorization(uri)
        for _ in range(_MOST_REDIRECTS + 1):
            is_same_host = urlsplit(place)[:2] == urlsplit(uri)[:2]
            answer = self._ask(place, {**(login if is_same_host else {}), **headers})
            location = answer.get_redirect_location()
            if not location:
                break
            with suppress(HTTPError):
                answer.read1(CHUNK_BYTES)  # a short body is then at its end: the connection stays
            answer.close()
            place = _redirected(uri, place, location)
        else:
            raise ObjectError(
                f"cannot read {uri}: it is redirected more than {_MOST_REDIRECTS} times; give the "
                "address that it leads to"
            )
        try:
            yield answer
        finally:
            answer.close()

    def _ask(self, place: str, headers: Mapping[str, str]) -> urllib3.BaseHTTPResponse:
        return self._pool(place).request(
            "GET",
            place,
            headers={"Accept-Encoding": "identity", **headers},
            preload_content=False,
            decode_content=False,
            timeout=urllib3.Timeout(connect=CONNECT_SEC, read=ANSWER_SEC),
            redirect=False,
            retries=False,  # we try again ourselves, with a time limit
        )

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

    def __init__(self, uri: str, answer: urllib3.BaseHTTPResponse, scratch: Path | None) -> None:
        digest, size = hashlib.sha256(), 0
        folder = scratch or Path(tempfile.gettempdir())
        with explained("write", str(folder)):
            folder.mkdir(parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by the next line
        with file:
            _check_room(uri, folder, 0, answer.length_remaining or 0)
            for chunk in _body(uri, answer):
                _check_room(uri, folder, size, len(chunk))
                digest.update(chunk)
                size += len(chunk)
                with explained("write", str(folder)):
                    file.write(chunk)
            with explained("write", str(folder)):
                file.flush()
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self.size = size
        self.version = _etag(answer) or _DIGEST + digest.hexdigest()

    def found(self) -> Found:
        return Found(self.size, self.version, self)

    def read(self, start: int, size: int) -> bytes:
        return os.pread(self._file, size, start)


def _check_room(uri: str, folder: Path, written: int, more: int) -> None:
    """Raise `ObjectError` unless a copy with so many bytes may get so many more."""
    if written + more > MOST_COPY_BYTES:
        raise ObjectError(
            f"cannot read {uri}: the server sends no ranges or no strong ETag, and a copy of the "
            f"file would have more than {MOST_COPY_BYTES:,} bytes; put it into a folder or at s3://"
        )
    with explained("write", str(folder)):
        disk = shutil.disk_usage(folder)
    # Some file systems say nothing.
    if disk.total and disk.free - more < min(MOST_SPARE_BYTES, disk.total // 20):
        raise ObjectError(
            f"cannot read {uri}: the server sends no ranges or no strong ETag, and {folder} has no "
            "space for a copy of the file; free space there, or put the file at s3://"
        )


def _body(uri: str, answer: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """The parts of a body as they come. Raises `ObjectError` if they come too slowly."""
    since, come = time.monotonic(), 0
    while chunk := answer.read1(_most_now(answer), decode_content=False):
        yield chunk
        come += len(chunk)
        if come >= PACE_BYTES:
            since, come = time.monotonic(), 0
        elif time.monotonic() - since > PACE_SEC:
            raise ObjectError(
                f"cannot read {uri}: the server sends less than {PACE_BYTES:,} bytes in "
                f"{PACE_SEC:g} seconds",
                passing=True,
            )


def _most_now(answer: urllib3.BaseHTTPResponse) -> int:
    """Bytes to read at once: never more than were announced, which old Pythons do not check."""
    left = answer.length_remaining
    return CHUNK_BYTES if left is None else min(CHUNK_BYTES, left)


def _redirected(uri: str, place: str, location: str) -> str:
    """Where an answer leads. Errors do not quote it, because it may hold a signature."""
    try:
        target = urljoin(place, location)
        scheme = parse_url(target).scheme
    except ValueError:
        target, scheme = "", None
    if scheme not in ("http", "https"):
        raise ObjectError(
            f"cannot read {uri}: it is redirected to something that is not a web address"
        )
    if uri.startswith("https:") and scheme == "http":
        raise ObjectError(f"cannot read {uri}: it leads to http://, which is not safe")
    return target


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
        with explained("read", str(path)):
            known = netrc.netrc(path).authenticators(urlsplit(uri).hostname or "")
    except netrc.NetrcParseError as error:  # its text may quote a password
        raise ObjectError(
            f"cannot read {path}: line {error.lineno} is not as in a netrc file; correct it"
        ) from None
    if known is None:
        return {}
    user, _, password = known
    return {"Authorization": f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"}
