"""What a kind of store that is only read offers. `remote.py` makes an object store of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class Copy(Protocol):
    """All bytes of a file on this machine, for as long as somebody holds this."""

    def read(self, start: int, size: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Found:
    """A file of a store."""

    size: int  # bytes
    version: str  # of its bytes: an ETag, a generation or a digest, never a time
    copy: Copy | None = field(default=None, compare=False)  # if it cannot be read in ranges


class VersionGoneError(Exception):
    """The store no longer has that version."""


class Remote(Protocol):
    """One kind of store. Its methods raise whatever their library raises."""

    name: str  # in words
    remedy: str  # what to do where it denies access

    def look(self, uri: str) -> Found | None:
        """A file, None if there is none."""
        ...

    def find(self, folder: str) -> dict[str, Found]:
        """All files below a folder, by uri."""
        ...

    def read(self, uri: str, found: Found, start: int, size: int) -> bytes:
        """Bytes [start, start + size) of the version that was found. Raises `VersionGoneError`."""
        ...
