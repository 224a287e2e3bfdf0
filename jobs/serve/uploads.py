"""Receives a file as multipart/form-data: to the disk while it is hashed, never whole in memory.

The whole file is on the disk before its row is in the store, so one that was cut off is never
listed.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from specbatch.jobs.serve.errors import ApiError, wrong
from specbatch.jobs.serve.file_store import FILE, FileStore
from specbatch.pipeline.privacy.tenants import Privacy
from specbatch.schemas.file_modes import Access, new_file
from specbatch.schemas.serving import Purpose, StoredFile, new_id

MOST_FIELD_BYTES = 4096  # of a form's field that is no file
MOST_HEADER_BYTES = 8192  # of one part
MOST_PARTS = 16
MOST_NAME_CHARS = 255
LEAST_BYTES_PER_SEC = 1024  # of a body, on the average
_KNOWN = ("purpose", "file")


@dataclass(slots=True)
class Upload:
    """A form being received. `feed` may be called by any thread, one at a time."""

    place: Path
    access: Access
    most_bytes: int
    fields: dict[str, bytes] = field(default_factory=dict)
    filename: str | None = None
    size: int = 0
    ended: bool = False
    _hash: Any = field(default_factory=hashlib.sha256)
    _file: BinaryIO | None = None
    _parser: MultipartParser | None = None
    _headers: dict[bytes, bytes] = field(default_factory=dict)
    _header: tuple[bytearray, bytearray] = field(default_factory=lambda: (bytearray(), bytearray()))
    _header_bytes: int = 0
    _parts: int = 0
    _name: str = ""  # of the part being read
    _is_file: bool = False

    def begin(self, content_type: str) -> None:
        """Raises `ApiError` for what is no form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise ApiError(400, "send the file as multipart/form-data, with `purpose` and `file`")
        callbacks: dict[str, Callable[..., None]] = {
            "on_part_begin": self._part_begins,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._header_ends,
            "on_headers_finished": self._headers_end,
            "on_part_data": self._part_data,
            "on_end": self._ends,
        }
        try:
            self._parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]  # its TypedDict names the same callbacks
        except FormParserError:
            raise _no_form() from None

    def feed(self, chunk: bytes) -> None:
        """Raises `ApiError`."""
        assert self._parser is not None, "begun"
        try:
            self._parser.write(chunk)
        except FormParserError:
            raise _no_form() from None

    def finish(self, file_store: FileStore, tenant: str, privacy: Privacy) -> StoredFile:
        """Put the whole file in its place, marked: the caller adds the row, and takes the mark
        away then. Raises `ApiError`."""
        if not self.ended:
            raise ApiError(400, "the upload was cut off: send it again", "incomplete_upload")
        purpose = self.fields.get("purpose", b"").decode(errors="replace")
        if purpose != Purpose.BATCH:
            raise wrong("purpose", f"purpose {purpose[:50]!r} is not supported: use `batch`")
        if self._file is None:
            raise wrong("file", "the form has no file: send one as `file`")
        if not self.size:
            raise wrong("file", "the file is empty: it must have one request per line")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        name = privacy.label(tenant, self.filename or "upload.jsonl")
        file_id = new_id(FILE)
        file_store.mark(file_id)
        file_store.keep(self.place, file_id)
        return StoredFile(
            *(file_id, tenant, Purpose.BATCH, name, self.size, self._hash.hexdigest()),
            file_store.service_id,
        )

    def close(self) -> None:
        """Drop what was not finished."""
        try:
            if self._file is not None:
                self._file.close()
        finally:
            self.place.unlink(missing_ok=True)

    # --- called by the parser ---------------------------------------------------------------
    def _part_begins(self) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise ApiError(413, f"the form has more than {MOST_PARTS} parts: send one file")
        self._headers, self._header_bytes = {}, 0

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._take_header(0, data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._take_header(1, data[start:end])

    def _take_header(self, which: int, data: bytes) -> None:
        self._header_bytes += len(data)
        if self._header_bytes > MOST_HEADER_BYTES:
            raise ApiError(
                413, f"the headers of a part have more than {MOST_HEADER_BYTES} bytes: shorten them"
            )
        self._header[which].extend(data)

    def _header_ends(self) -> None:
        name, value = self._header
        self._headers[bytes(name).lower()] = bytes(value)
        self._header = (bytearray(), bytearray())

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._is_file = self._name == "file"
        if self._is_file:
            if self._file is not None:
                raise wrong("file", "the form has two files: send one at a time")
            given = options.get(b"filename", b"").decode(errors="replace")
            self.filename = given[:MOST_NAME_CHARS].replace("\0", "\N{REPLACEMENT CHARACTER}")
            self._file = new_file(self.place, self.access)
        elif self._name.startswith("expires_after"):
            said = "`expires_after` is not supported: delete files when you are done"
            raise wrong("expires_after", said)
        elif self._name not in _KNOWN:
            raise ApiError(400, f"the form has an unknown field {self._name[:50]!r}: leave it out")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        piece = data[start:end]
        if not self._is_file:
            had = self.fields.get(self._name, b"")
            if len(had) + len(piece) > MOST_FIELD_BYTES:
                raise ApiError(
                    413, f"field {self._name[:50]!r} has more than {MOST_FIELD_BYTES} bytes"
                )
            self.fields[self._name] = had + piece
            return
        self.size += len(piece)
        if self.size > self.most_bytes:
            raise too_large(self.most_bytes)
        self._hash.update(piece)
        assert self._file is not None, "opened with its headers"
        self._file.write(piece)

    def _ends(self) -> None:
        self.ended = True


def too_large(most_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the file has more than {most_bytes:,} bytes, the most that is taken: split it",
        "file_too_large",
        "file",
    )


def _no_form() -> ApiError:
    return ApiError(400, "the body is not multipart/form-data: send `purpose` and `file` so")


async def limited(stream: AsyncIterator[bytes], most_bytes: int, what: str) -> AsyncIterator[bytes]:
    """The chunks of a body. Raises `ApiError` as soon as they are more than that."""
    had = 0
    async for chunk in stream:
        had += len(chunk)
        if had > most_bytes:
            raise ApiError(
                413, f"{what} has more than {most_bytes:,} bytes, the most that is taken"
            )
        if chunk:
            yield chunk


async def in_time(chunks: AsyncIterator[bytes], silence_sec: float) -> AsyncIterator[bytes]:
    """The chunks of a body. Raises `ApiError` where a client is silent for so long, sends slower
    than `LEAST_BYTES_PER_SEC` after that time, or is gone. What the consumer takes for a chunk is
    not the client's time."""
    clock = asyncio.get_running_loop().time
    may_last_until = clock() + silence_sec
    while True:
        left_sec = min(silence_sec, may_last_until - clock())
        try:
            async with asyncio.timeout(left_sec):
                chunk = await anext(chunks, None)
        except ClientDisconnect:
            raise ApiError(400, "the request was cut off: send it again") from None
        except TimeoutError:
            raise ApiError(
                408,
                f"the body came too slowly: send at least {LEAST_BYTES_PER_SEC:,} bytes a second, "
                f"and never pause for {silence_sec:g} s",
            ) from None
        if chunk is None:
            return
        came_at = clock()
        yield chunk
        may_last_until += len(chunk) / LEAST_BYTES_PER_SEC + clock() - came_at
