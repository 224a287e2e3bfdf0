"""Parquet files through `parquet_child.py`: what decoding may cost is limited, crashes included."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa

from specbatch.pipeline.ingest.limited import LimitedProcess, LimitError

_CHILD = "specbatch.pipeline.ingest.parquet_child"


class DamagedError(Exception):
    """The bytes are not the Parquet they should be."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A row group, as the footer tells of it."""

    rows: int
    bytes: dict[str, int]  # uncompressed, by the path of the column


@dataclass(frozen=True, slots=True)
class FileFacts:
    schema: pa.Schema
    groups: tuple[GroupFacts, ...]

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.groups)


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows. `long`: by row and column, the bytes of cells that were left out."""

    batch: pa.RecordBatch
    long: dict[int, dict[str, int]]


class ParquetReader:
    """One file at a time, in one process for many. Not safe to share between threads.

    All methods raise `LimitError` where the process needed more memory or time than it may have, or
    crashed; a new one is started for what is asked next. What reading `file` raises goes through.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._child: LimitedProcess | None = None
        self._file: BinaryIO | None = None
        self._size = 0
        self._is_open = False  # in the child

    def open(self, file: BinaryIO) -> FileFacts:
        """What its footer says. Raises `DamagedError`."""
        self._file, self._size, self._is_open = file, file.seek(0, 2), False
        return self._opened()

    def rows(
        self, group: int, columns: Sequence[str], batch_rows: int, skip: int, cap: int
    ) -> Iterator[Rows]:
        """The rows of a row group after the first `skip`, decoded `batch_rows` at a time.

        Cells of more than `cap` bytes are null. Raises `DamagedError`.
        """
        if not self._is_open:
            self._opened()
        is_done = False
        try:
            self._ask(
                do="read", group=group, columns=list(columns), rows=batch_rows, skip=skip, cap=cap
            )
            while (answer := self._answer())[0] != b"D":
                line, _, rest = answer[1].partition(b"\n")
                long = {int(row): sizes for row, sizes in json.loads(line).items()}
                yield Rows(pa.ipc.open_stream(rest).read_next_batch(), long)
            is_done = True
        except DamagedError:
            is_done = True
            raise
        finally:
            if not is_done:
                self.close()

    def close(self) -> None:
        """End the process; the next question starts another one."""
        self._is_open = False
        if self._child is not None:
            self._child.close()
            self._child = None

    def _opened(self) -> FileFacts:
        self._ask(do="open", size=self._size)
        schema = pa.ipc.read_schema(pa.py_buffer(self._answer()[1]))
        facts = json.loads(self._answer()[1])
        self._is_open = True
        return FileFacts(schema, tuple(GroupFacts(g["rows"], g["bytes"]) for g in facts["groups"]))

    def _ask(self, **asked: Any) -> None:
        if self._child is None:
            self._child = LimitedProcess(_CHILD, str(self._memory_bytes))
        try:
            self._child.send(json.dumps(asked).encode(), b"\n")
        except LimitError:
            self.close()
            raise

    def _answer(self) -> tuple[bytes, bytes]:
        """The next frame that is no question for bytes of the file."""
        assert self._child is not None, "something was asked"
        try:
            while True:
                head = self._child.exactly(9)
                kind, payload = head[:1], self._child.exactly(struct.unpack("<q", head[1:])[0])
                if kind != b"?":
                    break
                data = self._bytes(*struct.unpack("<qq", payload))
                self._child.send(struct.pack("<q", len(data)), data)
        except BaseException:
            self.close()
            raise
        if kind == b"E":
            said = json.loads(payload)
            if said["kind"] == "memory":
                self.close()
                raise LimitError("it needs too much memory")
            raise DamagedError(said["words"])
        return kind, payload

    def _bytes(self, offset: int, size: int) -> bytes:
        assert self._file is not None, "a file is opened first"
        self._file.seek(offset)
        return self._file.read(size)
