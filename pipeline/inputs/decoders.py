"""Decode one Parquet or Arrow file, group by group and only the needed columns.

They run in the process of `columnar_child.py`. A group is a row group of Parquet, or a record batch
of Arrow. Arrow files and streams are read alike: a file is a stream with an index after it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from specbatch.pipeline.inputs.column_types import is_text

READ_BUFFER_BYTES = 4 << 20  # of Parquet, per column; one request to S3
MOST_BATCHES = 250_000  # of an Arrow file: each is kept in mind
MOST_METADATA_BYTES = 64 << 20  # of one message


class UnsupportedError(Exception):
    """The file may be whole, but is not for us; the words say why and what to do."""


class Group(NamedTuple):
    """A group, as the file describes it. `bytes`: uncompressed, by the path of the column."""

    rows: int
    bytes: dict[str, int]


class Decoder(Protocol):
    schema: pa.Schema
    groups: list[Group]

    def batches(self, group: int, columns: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        """These columns of a group, at most `rows` at a time.

        Raises what pyarrow does, and `ValueError` or `OSError`, if the file is damaged.
        """
        ...


def open_decoder(name: str, file: BinaryIO) -> Decoder:
    """Raises as `batches` does, and `UnsupportedError`."""
    return ArrowDecoder(file) if name == "arrow" else ParquetDecoder(file)


# --- Parquet ------------------------------------------------------------------------------------
class ParquetDecoder:
    def __init__(self, file: BinaryIO) -> None:
        first = pq.ParquetFile(file, page_checksum_verification=True)
        metadata = first.metadata
        self.schema = first.schema_arrow.remove_metadata()
        self.groups = [_group(metadata.row_group(i)) for i in range(metadata.num_row_groups)]
        self._parquet = pq.ParquetFile(
            file,
            metadata=metadata,
            read_dictionary=_with_dictionary(metadata, self.schema),
            buffer_size=READ_BUFFER_BYTES,
            page_checksum_verification=True,
        )

    def batches(self, group: int, columns: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        yield from self._parquet.iter_batches(
            batch_size=rows,
            row_groups=[group],
            columns=columns,
            use_threads=False,  # the next stage has the processor busy; fewer buffers in flight
        )


def _group(group: pq.RowGroupMetaData) -> Group:
    sizes: dict[str, int] = {}
    for index in range(group.num_columns):
        chunk = group.column(index)
        path = chunk.path_in_schema
        sizes[path] = sizes.get(path, 0) + chunk.total_uncompressed_size
    return Group(group.num_rows, sizes)


def _with_dictionary(metadata: pq.FileMetaData, schema: pa.Schema) -> list[str]:
    """Dictionary-encoded text columns. They stay encoded, because a copy per row may be a million
    times as large as the file."""
    named = {name for name in schema.names if is_text(schema.field(name).type)}
    found: set[str] = set()
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for index in range(group.num_columns):
            chunk = group.column(index)
            if chunk.path_in_schema in named and any("DICT" in e for e in chunk.encodings):
                found.add(chunk.path_in_schema)
    return sorted(found)


# --- Arrow --------------------------------------------------------------------------------------
_MAGIC = b"ARROW1"
FEATHER_1 = b"FEA1"
IS_FEATHER_1 = "it is Feather version 1; write it again as version 2"
_CONTINUES = b"\xff\xff\xff\xff"
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # kinds of messages


@dataclass(frozen=True, slots=True)
class _Message:
    """A message of a stream: its kind, where it lies, and its rows if it is a record batch."""

    kind: int
    start: int
    end: int
    rows: int


class ArrowDecoder:
    """Reads the record batches one after the other, or from any of them on.

    pyarrow decodes. To begin in the middle it gets the schema, all dictionaries before that place,
    and what follows. Its reader of files would need the whole body of a batch to count its rows.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        messages = _messages(file)
        if not messages or messages[0].kind != _SCHEMA:
            raise ValueError("no schema")
        self._messages = messages
        self._batches = [at for at, one in enumerate(messages) if one.kind == _BATCH]
        if len(self._batches) > MOST_BATCHES:
            raise UnsupportedError(
                f"it has more than {MOST_BATCHES:,} record batches; write it again with larger ones"
            )
        self.groups = [Group(messages[at].rows, {}) for at in self._batches]
        given = pa.ipc.open_stream(_Spans(file, messages[:1])).schema
        self._names: list[str] = given.names
        self.schema = pa.schema([pa.field(one.name, _plain_type(one.type)) for one in given])
        self._stream: pa.RecordBatchReader | None = None
        self._next: tuple[int, tuple[str, ...]] = (-1, ())  # what the stream reads next

    def batches(self, group: int, columns: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        asked = (group, tuple(columns))
        stream = self._stream if self._next == asked else None
        self._stream = None  # a reader that failed is not used again
        stream = stream or self._from(group, columns)
        batch = stream.read_next_batch().select(list(columns))
        self._stream, self._next = stream, (group + 1, tuple(columns))
        for column in batch.columns:
            _check(column)
        for first in range(0, batch.num_rows, rows):
            yield pa.RecordBatch.from_arrays(
                [_plain(column.slice(first, rows)) for column in batch.columns], names=list(columns)
            )

    def _from(self, group: int, columns: Sequence[str]) -> pa.RecordBatchReader:
        """A stream of the record batches from this one on."""
        at = self._batches[group]
        before = [one for one in self._messages[:at] if one.kind != _BATCH]
        options = pa.ipc.IpcReadOptions(
            included_fields=[self._names.index(name) for name in columns], use_threads=False
        )
        spans = _Spans(self._file, before + self._messages[at:])
        return pa.ipc.open_stream(spans, options=options)


def _messages(file: BinaryIO) -> list[_Message]:
    """The messages of a file or stream, without their bodies. Raises `ValueError` if it does not
    end as it should, and `UnsupportedError`."""
    size = file.seek(0, 2)
    file.seek(0)
    head = file.read(8)
    if head.startswith(FEATHER_1):
        raise UnsupportedError(IS_FEATHER_1)
    is_file = head.startswith(_MAGIC)
    found: list[_Message] = []
    at = len(head) if is_file else 0
    while (message := _message(file, at, size)) is not None:
        found.append(message)
        at = message.end
        if len(found) > 2 * MOST_BATCHES:
            raise UnsupportedError("it has too many messages; write it again with larger batches")
    if is_file:
        batches = pa.ipc.open_file(file).num_record_batches
        if batches != sum(one.kind == _BATCH for one in found):
            raise ValueError(f"its footer names {batches} record batches, and there are others")
    return found


def _message(file: BinaryIO, start: int, size: int) -> _Message | None:
    """The message at `start`, None at the mark that ends a stream."""
    file.seek(start)
    prefix = file.read(8)
    skip = 4 if prefix[:4] == _CONTINUES else 0  # earlier versions have the length alone
    if len(prefix) < skip + 4:
        raise ValueError("a stream ends without its mark")
    (length,) = struct.unpack_from("<i", prefix, skip)
    if length == 0:
        return None
    if not 0 < length <= MOST_METADATA_BYTES:
        raise ValueError("no message")
    file.seek(start + skip + 4)
    metadata = file.read(length)
    try:
        kind, body, rows = _read_metadata(metadata)
    except struct.error as error:
        raise ValueError("no message") from error
    end = start + skip + 4 + length + body
    if body < 0 or rows < 0 or end > size:
        raise ValueError("a message is cut off")
    return _Message(kind, start, end, rows)


def _read_metadata(metadata: bytes) -> tuple[int, int, int]:
    """(kind, bytes of the body, rows) of a message, a Flatbuffers table of Arrow's Message.fbs."""

    def field(table: int, number: int) -> int:
        """Where a field of a table is; 0 if it is absent."""
        vtable = table - struct.unpack_from("<i", metadata, table)[0]
        (length,) = struct.unpack_from("<H", metadata, vtable)
        place = 4 + 2 * number
        (there,) = struct.unpack_from("<H", metadata, vtable + place) if place < length else (0,)
        return table + there if there else 0

    def long(place: int) -> int:
        return int(struct.unpack_from("<q", metadata, place)[0]) if place else 0

    (message,) = struct.unpack_from("<I", metadata, 0)
    place = field(message, 1)
    kind = metadata[place] if 0 < place < len(metadata) else 0
    body, rows = long(field(message, 3)), 0
    if kind == _BATCH and (place := field(message, 2)):
        batch = place + struct.unpack_from("<I", metadata, place)[0]
        rows = long(field(batch, 0))
    return kind, body, rows


class _Spans:
    """A file that consists of parts of another, for pyarrow to read from begin to end."""

    closed = False

    def __init__(self, file: BinaryIO, messages: Sequence[_Message]) -> None:
        self._file = file
        self._parts = iter(_joined(messages))
        self._at = self._end = 0

    def read(self, size: int = -1) -> Any:
        while self._at == self._end:
            part = next(self._parts, None)
            if part is None:
                return b""
            self._at, self._end = part
        self._file.seek(self._at)
        data = self._file.read(min(size, self._end - self._at))
        self._at += len(data)
        return data

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def flush(self) -> None:
        """pyarrow asks for it."""

    def close(self) -> None:
        """The file itself stays open."""


def _joined(messages: Sequence[_Message]) -> Iterator[tuple[int, int]]:
    """Where messages lie, neighbours as one part."""
    start = end = -1
    for one in messages:
        if one.start != end:
            if end > start:
                yield start, end
            start = one.start
        end = one.end
    if end > start:
        yield start, end


# --- columns of Arrow ---------------------------------------------------------------------------
def _plain_type(kind: pa.DataType) -> pa.DataType:
    """The type that `_plain` gives."""
    if isinstance(kind, pa.BaseExtensionType):
        return _plain_type(kind.storage_type)
    if pa.types.is_run_end_encoded(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary_view(kind) else kind


def _plain(column: pa.Array) -> pa.Array:
    """The column in a layout that Parquet has too. Text stays unchecked."""
    if isinstance(column, pa.ExtensionArray):
        return _plain(column.storage)
    if pa.types.is_run_end_encoded(column.type):
        return _plain(pc.run_end_decode(column))
    if pa.types.is_string_view(column.type) or pa.types.is_binary_view(column.type):
        return _as_bytes(column).cast(pa.large_binary()).view(_plain_type(column.type))
    return column


def _check(column: pa.Array) -> None:
    """Raise what pyarrow does if offsets or numbers of a column lead out of its data.

    Text that is not UTF-8 is left to whoever reads the row.
    """
    if isinstance(column, pa.ExtensionArray):
        _check(column.storage)
    elif pa.types.is_dictionary(column.type):
        column.validate()
        indices = column.indices
        indices.validate(full=True)
        bounds = pc.min_max(indices)
        if bounds["min"].is_valid and not (
            bounds["min"].as_py() >= 0 and bounds["max"].as_py() < len(column.dictionary)
        ):
            raise ValueError("an entry that a dictionary does not have")
        _check(column.dictionary)
    else:
        _as_bytes(column).validate(full=True)


_BINARY = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}
_LISTS = (
    (pa.types.is_list, pa.list_),
    (pa.types.is_large_list, pa.large_list),
    (pa.types.is_list_view, pa.list_view),
    (pa.types.is_large_list_view, pa.large_list_view),
)


def _as_bytes(column: pa.Array) -> pa.Array:
    kind = _as_binary(column.type)
    try:
        return column if kind == column.type else column.view(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):  # then its text is checked too
        return column


def _as_binary(kind: pa.DataType) -> pa.DataType:
    """The type with bytes for text, in lists, maps, structs and dictionaries too."""
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _as_binary(kind.value_type), kind.ordered)
    if pa.types.is_struct(kind):
        return pa.struct([_field_as_binary(field) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_field_as_binary(kind.key_field), _field_as_binary(kind.item_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_field_as_binary(kind.value_field), kind.list_size)
    for is_kind, made in _LISTS:
        if is_kind(kind):
            return made(_field_as_binary(kind.value_field))
    return _BINARY.get(kind, kind)


def _field_as_binary(field: pa.Field) -> pa.Field:
    return field.with_type(_as_binary(field.type))
