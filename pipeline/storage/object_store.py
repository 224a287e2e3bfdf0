"""The contract of object stores. `objects.py` chooses between the implementations."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from specbatch.schemas.errors import ObjectError
from specbatch.schemas.records import Artefact
from specbatch.schemas.refusals import REFUSALS, REMEDIES

MOST_MOVED_BYTES = 1 << 30  # a copy is one request, which must end before it times out


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One stored file."""

    uri: str
    size: int  # bytes
    version: str


class ObjectStore(Protocol):
    """The contract. All methods raise `ObjectError` if the store refuses."""

    def put_bytes(self, uri: str, data: bytes) -> Artefact:
        """Write or replace a file."""
        ...

    def put_file(self, uri: str, local_path: Path, staging: str | None = None) -> Artefact:
        """Write or replace a file from a local one; memory does not grow with it.

        `staging`: the folder of a temporary file, where the store needs one (default: beside the
        file). It must be on the same file system.
        """
        ...

    def put_new(self, uri: str, data: bytes) -> bool:
        """Write a file unless it exists; False when it did. Atomic: of two callers one wins."""
        ...

    def get_bytes(self, uri: str, expect: Artefact | None = None) -> bytes:
        """Read a whole file; with `expect`, raise if size or SHA-256 differ."""
        ...

    def open(self, uri: str, version: str | None = None) -> BinaryIO:
        """A random-access reader; raises if the file is no longer at `version`."""
        ...

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Every file at or under a prefix (folder), sorted by uri."""
        ...

    def head(self, uri: str) -> ObjectInfo | None:
        """Size and version, or None if there is no such file."""
        ...

    def delete(self, uri: str) -> None:
        """Remove a file; it need not exist."""
        ...

    def is_whole(self, artefact: Artefact) -> bool:
        """Whether the file is there with this size and SHA-256, as this store wrote it."""
        ...

    def move(self, artefact: Artefact, to: str) -> None:
        """Move a whole file within a store, replacing another: none of its bytes come here. It
        appears at once. Where the store can only copy, the first one stays."""
        ...

    def clear(self, folder: str) -> None:
        """Remove every file below a folder, unlisted uploads too, and the folder itself."""
        ...

    def abort_uploads(self, prefix: str) -> None:
        """Abort unlisted uploads under a prefix, as a killed process leaves them.

        Uploads in progress fail too. Does nothing if the store's rights forbid it.
        """
        ...


def verified(uri: str, data: bytes, expect: Artefact | None) -> bytes:
    """`data` itself; raises `ObjectError` unless it is what `expect` describes."""
    if expect is None:
        return data
    if len(data) != expect.size_bytes:
        raise ObjectError(
            f"{uri} has {len(data)} bytes where {expect.size_bytes} were written; "
            "the file was damaged or replaced"
        )
    if hashlib.sha256(data).hexdigest() != expect.sha256:
        raise ObjectError(f"{uri} fails its SHA-256 check; the file was damaged or replaced")
    return data


def changed(uri: str) -> ObjectError:
    """The error for a file that is no longer the version asked for."""
    return ObjectError(f"{uri} changed while it was being read; it must not change")


@contextmanager
def explained(verb: str, uri: str, only: Collection[int] | None = None) -> Iterator[None]:
    """Turn the system's refusals inside the block into an `ObjectError` with file and remedy.

    `only`: limits this to these error numbers.
    """
    try:
        yield
    except OSError as error:
        if only is not None and error.errno not in only:
            raise
        reason = (error.strerror or type(error).__name__).lower()
        remedy = REMEDIES.get(error.errno or 0) if verb == "write" else None
        raise ObjectError(
            f"cannot {verb} {uri}: {reason}" + (f"; {remedy}" if remedy else ""),
            refused=verb == "write" and error.errno in REFUSALS,
            place=uri,
        ) from error
