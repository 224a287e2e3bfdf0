"""Parquet files through `parquet_child.py`: what decoding may cost is limited, crashes included."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa

from specbatch.pipeline.inputs.limited import KilledError, LimitedProcess, LimitError

GROWN_SHARE = 8  # of its memory a process may still hold this part, to be given another file

_CHILD = "specbatch.pipeline.inputs.parquet_child"


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
    """One file, in a process with a budget for it alone. Not safe to share between threads.

    All methods raise `LimitError` where the process needed more memory or time than it may have, or
    crashed; a new one is started for what is asked next. What reading `file` raises goes through.
    """

    def __init__(
        self, file: BinaryIO, memory_bytes: int, child: LimitedProcess | None = None
    ) -> None:
        """`child`: one that another reader has released."""
        self._file = file
        self._memory_bytes = memory_bytes
        self._size = file.seek(0, 2)
        self._child = child
        self._is_reading = False

    def facts(self) -> FileFacts:
        """What its footer says. Raises `DamagedError`."""
        try:
            return self._opened()
        except KilledError:  # by no limit of ours: the machine's trouble condemns no file
            return self._opened()

    def rows(
        self, group: int, columns: Sequence[str], batch_rows: int, skip: int, cap: int
    ) -> Iterator[Rows]:
        """The rows of a row group after the first `skip`, decoded `batch_rows` at a time.

        Cells of more than `cap` bytes are null. Between two batches the reader may be closed; the
        rest is then read by another process. Raises `DamagedError`.
        """
        ask = {"do": "read", "group": group, "columns": list(columns), "rows": batch_rows}
        is_done = False
        while not is_done:
            if self._child is None:
                self.facts()
            child = self._child
            self._is_reading = True
            self._ask(**ask, skip=skip, cap=cap)
            try:
                while self._child is child and not is_done:
                    kind, payload = self._answer()
                    is_done = kind == b"D"
                    if not is_done:
                        rows = _rows(payload)
                        skip += rows.batch.num_rows
                        yield rows
            except DamagedError:
                is_done = True
                raise
            finally:
                if not is_done:
                    self.close()
                self._is_reading = False

    def release(self) -> LimitedProcess | None:
        """The process, where it is fit for another file of the same job."""
        if self._child is None or self._is_reading:
            self.close()
            return None
        try:
            self._ask(do="close")
            grown = json.loads(self._answer()[1])["grown"]
        except (LimitError, DamagedError):
            self.close()
            return None
        if grown > self._memory_bytes // GROWN_SHARE:
            self.close()
        child, self._child = self._child, None
        return child

    def close(self) -> None:
        """End the process; the next question starts another one."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _opened(self) -> FileFacts:
        self._ask(do="open", size=self._size, memory=self._memory_bytes)
        schema = pa.ipc.read_schema(pa.py_buffer(self._answer()[1]))
        facts = json.loads(self._answer()[1])
        return FileFacts(schema, tuple(GroupFacts(g["rows"], g["bytes"]) for g in facts["groups"]))

    def _ask(self, **asked: Any) -> None:
        if self._child is None:
            self._child = LimitedProcess.fork(_CHILD)
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
        self._file.seek(offset)
        return self._file.read(size)


def _rows(payload: bytes) -> Rows:
    line, _, rest = payload.partition(b"\n")
    long = {int(row): sizes for row, sizes in json.loads(line).items()}
    return Rows(pa.ipc.open_stream(rest).read_next_batch(), long)
