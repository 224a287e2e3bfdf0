"""Decodes Parquet and Arrow for `columnar.py`, in a process with limited memory and time.

A file of a few kilobytes can decode to gigabytes, and a damaged one can crash the library that
reads it. The parent keeps the file and sends the bytes that this process asks for, so this process
needs neither names nor credentials. Answers are frames: a letter, a length, the payload.

    ?  offset and length of the bytes to send; the answer is their number and the bytes
    J  JSON: the groups of the file, or by how much this process has grown    S  the schema
    B  rows: a JSON line, then an Arrow stream      D  no more of them
    E  JSON: why it cannot continue: `damaged`, `memory` or `unsupported`
"""

from __future__ import annotations

import io
import json
import struct
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from specbatch.pipeline.inputs.column_types import is_list, is_text
from specbatch.pipeline.inputs.decoders import Decoder, UnsupportedError, open_decoder
from specbatch.pipeline.inputs.limited import limit_memory, limit_time, size_of_this_process

REQUEST_BYTES = 4 << 20  # that the parent reads and sends at once
PIECE_BYTES = 8 << 20  # of rows that go back together, about
BATCH_SEC = 20.0  # of the processor, for one batch

Sizes = NDArray[np.int64]  # [rows] bytes


def prepare() -> None:
    """Set up, once before any child, what libraries set up at their first use."""
    pa.set_cpu_count(1)
    texts = pa.array(["a", "b"]), pa.array(["a", "a"]).dictionary_encode(), pa.array([[1], [2]])
    batch = pa.RecordBatch.from_arrays(list(texts), names=["a", "b", "c"])
    for cap in (0, 100):
        list(_pieces(batch, cap))


def main() -> None:
    decoder: Decoder | None = None
    first_size = size_of_this_process()
    while line := sys.stdin.buffer.readline():
        asked = json.loads(line)
        limit_time(BATCH_SEC)
        try:
            if asked["do"] == "open":
                limit_memory(asked["memory"])  # above the present size: each file has all of it
                decoder = _open(asked["format"], asked["size"])
            elif asked["do"] == "close":
                decoder = None
                grown = size_of_this_process() - first_size
                _say(b"J", json.dumps({"grown": grown}).encode())
            else:
                assert decoder is not None, "a file is opened first"
                _read(decoder, asked)
        except MemoryError:
            _refuse("memory", "")
        except UnsupportedError as error:
            _refuse("unsupported", str(error))
        except (pa.ArrowException, OSError, ValueError) as error:
            _refuse("damaged", str(error))
        limit_time(0)


# --- frames -------------------------------------------------------------------------------------
def _say(kind: bytes, *parts: bytes | memoryview) -> None:
    size = sum(len(part) for part in parts)
    sys.stdout.buffer.write(kind + struct.pack("<q", size))
    for part in parts:
        sys.stdout.buffer.write(part)
    sys.stdout.buffer.flush()


def _refuse(kind: str, words: str) -> None:
    _say(b"E", json.dumps({"kind": kind, "words": words[:500]}).encode())


class _Remote(io.RawIOBase):
    """The file at the other end of the pipe."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = (0, self._at, self._size)[whence] + offset
        return self._at

    def read(self, size: int | None = -1) -> Any:
        """Bytes in an object that pyarrow takes as they are: a copy may be too much."""
        size = self._size - self._at if size is None or size < 0 else size
        data = bytearray(max(0, min(size, self._size - self._at)))
        view = memoryview(data)
        for first in range(0, len(data), REQUEST_BYTES):
            _ask_for(self._at, view[first : first + REQUEST_BYTES])
            self._at += min(REQUEST_BYTES, len(data) - first)
        return data


def _ask_for(offset: int, into: memoryview) -> None:
    """Have these bytes of the file sent. Raises `OSError` if it has fewer."""
    _say(b"?", struct.pack("<qq", offset, len(into)))
    (there,) = struct.unpack("<q", sys.stdin.buffer.read(8))
    if cast(io.BufferedReader, sys.stdin.buffer).readinto(into[:there]) != len(into):
        raise OSError("the file ends early")


# --- what is asked ------------------------------------------------------------------------------
def _open(name: str, size: int) -> Decoder:
    decoder = open_decoder(name, cast(BinaryIO, _Remote(size)))
    groups = [one._asdict() for one in decoder.groups]
    _say(b"S", memoryview(decoder.schema.serialize()))
    _say(b"J", json.dumps({"groups": groups}).encode())
    return decoder


def _read(decoder: Decoder, asked: dict[str, Any]) -> None:
    """All rows of a group after the first `skip`, in batches of `rows`."""
    at = 0
    for batch in decoder.batches(asked["group"], asked["columns"], asked["rows"]):
        drop = min(max(0, asked["skip"] - at), batch.num_rows)
        at += batch.num_rows
        if drop < batch.num_rows:
            for piece in _pieces(batch.slice(drop), asked["cap"]):
                _say(b"B", *piece)
        limit_time(BATCH_SEC)
    _say(b"D")


# --- sizes --------------------------------------------------------------------------------------
def _pieces(batch: pa.RecordBatch, cap: int) -> Iterator[tuple[bytes, memoryview]]:
    """The batch in parts of about `PIECE_BYTES`, without cells of more than `cap` bytes."""
    long: dict[int, dict[str, int]] = {}
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        sizes = sizes_of(column)
        over = np.flatnonzero(sizes > cap)
        for row in over.tolist():
            long.setdefault(row, {})[name] = int(sizes[row])
        columns.append(_without(column, over) if len(over) else column)
    first = 0
    while first < batch.num_rows:
        parts = [column.slice(first) for column in columns]
        cost = np.cumsum(sum(_cost(part) for part in parts))
        # The first row always fits, and the others may be the same text.
        count = max(1, int(np.searchsorted(cost - cost[0], PIECE_BYTES, side="right")))
        count = min(count, batch.num_rows - first)
        piece = [_compact(part.slice(0, count)) for part in parts]
        mine = {row - first: long[row] for row in long if first <= row < first + count}
        sink = pa.BufferOutputStream()
        table = pa.RecordBatch.from_arrays(piece, names=batch.schema.names)
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_batch(table)
        yield json.dumps(mine).encode() + b"\n", memoryview(sink.getvalue())
        first += count


def sizes_of(array: pa.Array) -> Sizes:
    """Approximate bytes of each row."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        of_values = sizes_of(array.dictionary)
        return np.where(_valid(array), _at(of_values, array), 0)
    if is_text(kind):
        if "view" in str(kind):
            array = array.cast(pa.large_binary())
        return _numbers(pc.binary_length(array))
    if is_list(kind):
        counts = _numbers(pc.list_value_length(array))
        ends = np.cumsum(counts)
        return _of_spans(sizes_of(array.flatten()), ends - counts, counts)
    if pa.types.is_map(kind):
        ends = _numbers(array.offsets)
        first, count = int(ends[0]), int(ends[-1] - ends[0])
        inner = sizes_of(array.keys.slice(first, count)) + sizes_of(array.items.slice(first, count))
        return _of_spans(inner, ends[:-1] - first, np.diff(ends))
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        counts = np.where(_valid(array), _numbers(array.sizes), 0)
        starts = np.where(counts, _numbers(array.offsets), 0)
        return _of_spans(sizes_of(array.values), starts, counts)
    if pa.types.is_union(kind):
        return _of_union(array)
    if pa.types.is_run_end_encoded(kind):
        return sizes_of(pc.run_end_decode(array))
    if isinstance(array, pa.ExtensionArray):
        return sizes_of(array.storage)
    if pa.types.is_struct(kind):
        fields = [sizes_of(field) for field in array.flatten()]
        return np.asarray(sum(fields, np.zeros(len(array), dtype=np.int64)))
    width = kind.byte_width if pa.types.is_fixed_size_binary(kind) else 0
    return np.full(len(array), max(8, width), dtype=np.int64)


def _of_spans(inner: Sizes, starts: Sizes, counts: Sizes) -> Sizes:
    """Bytes of rows with these parts of the `inner` values, which rows may share."""
    until = np.concatenate([[0], np.cumsum(inner)])
    return np.asarray(until[starts + counts] - until[starts] + 8 * counts)


def _of_union(array: pa.Array) -> Sizes:
    """A row has a value of one of the fields. pyarrow's own accessors forget where a slice
    begins."""
    is_dense = array.type.mode == "dense"
    buffers = array.buffers()
    codes = np.frombuffer(buffers[1], np.int8)[array.offset :][: len(array)]
    places: Sizes = np.arange(len(array))
    if is_dense:
        places = _places(buffers[2], array)
    sizes = np.zeros(len(array), dtype=np.int64)
    for number, code in enumerate(array.type.type_codes):
        mine = np.flatnonzero(codes == code)
        sizes[mine] = sizes_of(array.field(number))[places[mine]]
    return sizes


def _places(offsets: pa.Buffer, array: pa.Array) -> Sizes:
    found = np.frombuffer(offsets, np.int32)[array.offset :][: len(array)]
    return found.astype(np.int64)


def _cost(array: pa.Array) -> Sizes:
    """The same for rows that are sent together: a dictionary's text is sent once."""
    if not pa.types.is_dictionary(array.type):
        return sizes_of(array)
    cost = np.full(len(array), 8, dtype=np.int64)
    used, first = np.unique(_numbers(array.indices), return_index=True)
    if len(array.dictionary):
        cost[first] += sizes_of(array.dictionary)[np.clip(used, 0, len(array.dictionary) - 1)]
    return cost


def _compact(array: pa.Array) -> pa.Array:
    """The array with only the dictionary entries that these rows use."""
    if not pa.types.is_dictionary(array.type) or not len(array.dictionary):
        return array
    used, places = np.unique(_numbers(array.indices), return_inverse=True)
    places = pa.array(places.astype(np.int32), mask=~_valid(array))
    return pa.DictionaryArray.from_arrays(places, array.dictionary.take(pa.array(used)))


def _without(array: pa.Array, rows: NDArray[np.intp]) -> pa.Array:
    """The array with null in these rows."""
    keep = np.ones(len(array), dtype=np.bool_)
    keep[rows] = False
    if pa.types.is_dictionary(array.type):
        return pa.DictionaryArray.from_arrays(
            pa.array(_numbers(array.indices).astype(np.int32), mask=~(keep & _valid(array))),
            array.dictionary,
        )
    try:
        return array.take(pa.array(np.arange(len(array)), mask=~keep))
    except pa.ArrowNotImplementedError:  # such as of parts that are run-end encoded
        null = pa.nulls(1, array.type)
        return pa.concat_arrays([array.slice(i, 1) if keep[i] else null for i in range(len(array))])


def _valid(array: pa.Array) -> NDArray[np.bool_]:
    return np.asarray(array.is_valid().to_numpy(zero_copy_only=False), dtype=np.bool_)


def _numbers(array: pa.Array) -> Sizes:
    found = pc.fill_null(array, 0).to_numpy(zero_copy_only=False)
    return np.asarray(found).astype(np.int64)


def _at(values: Sizes, array: pa.Array) -> Sizes:
    if not len(values):
        return np.zeros(len(array), dtype=np.int64)
    return values[np.clip(_numbers(array.indices), 0, len(values) - 1)]


if __name__ == "__main__":
    main()
