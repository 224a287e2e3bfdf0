"""What a kind of store that is only read offers. `remote.py` makes an object store of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Found:
    """A file of a store."""

    size: int  # bytes
    version: str  # of its bytes: an ETag, a generation or a digest, never a time


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

    def read(self, uri: str, version: str, start: int, size: int) -> bytes:
        """Bytes [start, start + size) of a version. Raises `VersionGoneError`."""
        ...
