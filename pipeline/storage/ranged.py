"""A file that is read in ranges from a store."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, BinaryIO, cast

READ_AHEAD_BYTES = 4 << 20

ReadRange = Callable[[int, int], bytes]  # (start, size) to exactly these bytes


def ranged(size: int, read: ReadRange) -> BinaryIO:
    """Random access to `size` bytes; a read ahead fills 4 MiB."""
    return cast(BinaryIO, io.BufferedReader(_Ranged(size, read), READ_AHEAD_BYTES))


class _Ranged(io.RawIOBase):
    def __init__(self, size: int, read: ReadRange):
        self._size = size
        self._read = read
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._size - self._at)
        if size <= 0:
            return 0
        data = self._read(self._at, size)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def readall(self) -> bytes:
        """The rest, in large ranges; Python's own would ask for 8 KiB at a time."""
        parts = bytearray()
        while left := max(0, self._size - self._at):
            data = self._read(self._at, min(left, READ_AHEAD_BYTES))
            self._at += len(data)
            parts += data
        return bytes(parts)
