"""Reads rows of Parquet and Arrow files, one group at a time and only the needed columns.

A group is a row group of Parquet or a record batch of Arrow. A process with limits
(`columnar_child.py`) decodes them, whatever the size of the file or of a group. If a batch exceeds
the limits the reader asks for fewer rows; rows that fail even one by one are quarantined. The work
id of a row is (file version, group, row).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import struct
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO, Literal, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from specbatch.pipeline.inputs.column_types import is_list, is_text, plainly
from specbatch.pipeline.inputs.contract import (
    BYTES_PER_BATCH,
    MAX_ROW_BYTES,
    NO_ID,
    READER_BYTES,
    ROWS_PER_BATCH,
    Format,
    PromptKind,
    RawBatch,
    RawRow,
    ReadColumns,
    as_input_error,
    files_from,
)
from specbatch.pipeline.inputs.kept import check_there, common_schema
from specbatch.pipeline.inputs.limited import KilledError, LimitedProcess, LimitError
from specbatch.pipeline.inputs.prompt_template import check_columns, columns_of, prompt_columns
from specbatch.pipeline.inputs.text_files import check_unchanged
from specbatch.pipeline.storage.object_store import ObjectInfo
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.arrow import changed_within
from specbatch.schemas.errors import InputError, ObjectError
from specbatch.schemas.records import SourcePosition
from specbatch.schemas.spec import InputSpec

log = logging.getLogger(__name__)

GROWN_SHARE = 8  # a process that still holds more than this part of its memory is not reused

_CHILD = "specbatch.pipeline.inputs.columnar_child"


Kind = Literal["parquet", "arrow"]
_NAMES = {"parquet": "Parquet", "arrow": "Arrow"}
_GROUPS = {
    "parquet": ("row group", "row groups"),
    "arrow": ("record batch", "record batches"),
}


class DamagedError(Exception):
    """The bytes are not valid."""


class UnreadableError(Exception):
    """The file is of a kind that is not read; the words say why and what to do."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A group, as the file describes it."""

    rows: int
    bytes: dict[str, int]  # uncompressed, by the path of the column


@dataclass(frozen=True, slots=True)
class FileFacts:
    kind: Kind
    schema: pa.Schema
    groups: tuple[GroupFacts, ...]
    constants: Mapping[str, pa.Scalar] = dataclasses.field(
        default_factory=dict
    )  # columns that it lacks


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows. `long`: by row and column, the sizes of omitted cells."""

    batch: pa.RecordBatch
    long: dict[int, dict[str, int]]


class ColumnarReader:
    """Reads one file in a process with a budget of its own. Not safe to share between threads.

    All methods raise `LimitError` if the process crashed or exceeded its memory or time; the next
    request starts a new process. Errors from reading `file` pass through.
    """

    def __init__(
        self,
        file: BinaryIO,
        kind: Kind,
        memory_bytes: int,
        child: LimitedProcess | None = None,
    ) -> None:
        """`child`: a process that another reader has released."""
        self._file = file
        self._kind: Kind = kind
        self._memory_bytes = memory_bytes
        self._size = file.seek(0, 2)
        self._child = child
        self._is_reading = False

    def facts(self) -> FileFacts:
        """The columns and groups. Raises `DamagedError`, and `UnreadableError`."""
        try:
            return self._opened()
        except KilledError:  # not by our limits, so the file need not be at fault
            return self._opened()

    def rows(
        self, group: int, columns: Sequence[str], batch_rows: int, skip: int, cap: int
    ) -> Iterator[Rows]:
        """The rows of a group after the first `skip`, decoded `batch_rows` at a time.

        Cells of more than `cap` bytes are null. The reader may be closed between two batches;
        another process then reads the rest. Raises `DamagedError`.
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

    def check_unchanged(self, info: ObjectInfo) -> None:
        """Raise `InputError` if the file was written to since it was opened."""
        check_unchanged(self._file, info)

    def release(self) -> LimitedProcess | None:
        """The process, if it is fit for another file of the same job."""
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
        """End the process; the next request starts another one."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _opened(self) -> FileFacts:
        self._ask(do="open", format=self._kind, size=self._size, memory=self._memory_bytes)
        schema = pa.ipc.read_schema(pa.py_buffer(self._answer()[1]))
        facts = json.loads(self._answer()[1])
        groups = tuple(GroupFacts(g["rows"], g["bytes"]) for g in facts["groups"])
        return FileFacts(self._kind, schema, groups)

    def _ask(self, **asked: Any) -> None:
        if self._child is None:
            self._child = LimitedProcess.fork(_CHILD)
        try:
            self._child.send(json.dumps(asked).encode(), b"\n")
        except LimitError:
            self.close()
            raise

    def _answer(self) -> tuple[bytes, bytes]:
        """The next frame that is not a request for bytes of the file."""
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
            if said["kind"] == "unsupported":
                raise UnreadableError(said["words"])
            raise DamagedError(said["words"])
        return kind, payload

    def _bytes(self, offset: int, size: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(size)


def _rows(payload: bytes) -> Rows:
    line, _, rest = payload.partition(b"\n")
    long = {int(row): sizes for row, sizes in json.loads(line).items()}
    return Rows(pa.ipc.open_stream(rest).read_next_batch(), long)


MOST_UNREADABLE = 100_000  # quarantined rows of one group
_FEWER = 16  # times fewer rows per batch, after a batch exceeded a limit
_ACCEPTED = {
    "text": "text (string, binary, or a dictionary of strings)",
    "token_ids": "token ids (a list of integers)",
    "messages": "chat messages (a list of {role, content}, or JSON text with prompt_kind messages)",
}


class Layout(Protocol):
    """The columns of a table, whose files may lack some."""

    @property
    def schema(self) -> pa.Schema: ...

    def filled(self, uri: str, facts: FileFacts) -> FileFacts:
        """What a file has as a part of the table."""
        ...


class ColumnarSource:
    """A list of Parquet or Arrow files with the same columns, perhaps those of a table."""

    def __init__(
        self,
        spec: InputSpec,
        objects: Objects,
        files: list[ObjectInfo],
        kind: Kind,
        memory_bytes: int = READER_BYTES,
        layout: Layout | None = None,
    ):
        """`layout`: of a table, which alone may have no files."""
        self.files = files
        self._layout = layout
        self.format: Format = kind
        self._kind: Kind = kind
        self._spec = spec
        self._objects = objects
        self._memory_bytes = memory_bytes
        self._readers: weakref.WeakSet[ColumnarReader] = weakref.WeakSet()  # of open files
        self._spare: list[LimitedProcess] = []  # for the next file; never for another job's
        if layout is not None:
            schema = layout.schema
        else:
            with self._open(files[0]) as (_, first):
                schema = first.schema
        names = schema.names
        self._first = tuple((field.name, str(field.type)) for field in schema)
        self._id = spec.id_column or ("id" if "id" in names else None)
        self._tag = spec.tag_column or ("tag" if "tag" in names else None)
        self.has_ids = self._id is not None

    def check(self) -> None:
        if self._layout is not None:
            self._check_columns(self._spec.uri, self._layout.schema)
        for info in self.files:
            with self._open(info) as (_, facts):
                self._check_columns(info.uri, facts.schema)

    def read(self, start: SourcePosition | None = None) -> Iterator[RawBatch]:
        for info in files_from(self.files, start):
            begin = start if start is not None and info.uri == start.uri else None
            with self._open(info) as (reader, facts):
                kind = self._check_columns(info.uri, facts.schema)
                for group in range(begin.row_group if begin else 0, len(facts.groups)):
                    skip = begin.row_offset if begin and group == begin.row_group else 0
                    yield from self._raws(reader, _Group(info, facts, group), skip, kind)

    def ids_until(self, position: SourcePosition) -> Iterator[list[Any]]:
        if self._id is None:
            return
        for info in self.files:
            here = info.uri == position.uri
            with self._open(info) as (reader, facts):
                for group in range(len(facts.groups)):
                    if here and group > position.row_group:
                        return
                    last = here and group == position.row_group
                    limit = position.row_offset if last else None
                    yield from self._ids(reader, _Group(info, facts, group), 0, limit)
            if here:
                return

    def kept_schema(self, wanted: Sequence[str] | None) -> pa.Schema:
        found = self._schemas()
        if self._layout is not None and not self.files:
            found = iter([(ObjectInfo(self._spec.uri, 0, ""), self._layout.schema)])
        schema = common_schema(found, wanted, self._id)
        for field in schema:
            _check_keepable(field)
        return pa.schema([field.with_type(plainly(field.type)) for field in schema])

    def columns(self) -> ReadColumns:
        return ReadColumns(self._first, self._id, prompt_columns(self._spec))

    def _schemas(self) -> Iterator[tuple[ObjectInfo, pa.Schema]]:
        for info in self.files:
            with self._open(info) as (_, facts):
                yield info, facts.schema

    def kept_rows(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        for info in self.files:
            with self._open(info) as (reader, facts):
                for number in range(len(facts.groups)):
                    place = _Group(info, facts, number)
                    for offset, found in self._batches(reader, place, schema.names, 0):
                        yield from _kept(place, offset, found, schema)

    def pause(self) -> None:
        for reader in list(self._readers):
            reader.close()
        while self._spare:
            self._spare.pop().close()

    def _ids(
        self, reader: ColumnarReader, place: _Group, skip: int, limit: int | None
    ) -> Iterator[list[Any]]:
        """The ids of a group's rows from `skip` on; `NO_ID` for unreadable rows."""
        assert self._id is not None, "asked only where there are ids"
        end = place.rows if limit is None else limit
        for offset, found in self._batches(reader, place, [self._id], skip):
            if isinstance(found, str):
                yield from _repeated(NO_ID, end - offset)
                return
            keep = max(0, min(found.batch.num_rows, end - offset))
            ids = plain(found.batch.column(0).slice(0, keep))
            yield [NO_ID if isinstance(one, NoValue) else one for one in ids]
            if offset + found.batch.num_rows >= end and end < place.rows:
                return  # otherwise read to the end, because only then the process is reusable

    def _batches(
        self, reader: ColumnarReader, place: _Group, columns: list[str], skip: int
    ) -> Iterator[tuple[int, Rows | str]]:
        """(row in the group, rows) of one group, after its first `skip` rows. If the rest
        cannot be read at all, the last item has the reason in place of rows."""
        offset, at_once = skip, place.batch_rows(columns)
        killed_at: int | None = None
        while True:
            try:
                with _damage_named(place, reader):
                    stored = place.stored(columns)
                    for rows in reader.rows(place.number, stored, at_once, offset, MAX_ROW_BYTES):
                        reader.check_unchanged(place.info)  # all its bytes are read by now
                        yield offset, place.whole(rows, columns)
                        offset += rows.batch.num_rows
                break
            except LimitError as error:
                reader.check_unchanged(place.info)
                if isinstance(error, KilledError) and killed_at != offset:
                    killed_at = offset  # not by our limits: read the same rows once more
                    continue
                if at_once == 1:
                    yield offset, str(error)
                    return
                at_once = max(1, at_once // _FEWER)
        if offset != max(skip, place.rows):
            reader.check_unchanged(place.info)
            raise InputError(f"{place} has fewer rows than the file says; write the file again")

    def _raws(
        self, reader: ColumnarReader, place: _Group, skip: int, kind: PromptKind
    ) -> Iterator[RawBatch]:
        for offset, found in self._batches(reader, place, self._columns(), skip):
            if isinstance(found, str):
                yield from self._unreadable(reader, place, offset, kind, found)
            else:
                yield self._raw(place, offset, found, kind)

    def _unreadable(
        self, reader: ColumnarReader, place: _Group, offset: int, kind: PromptKind, reason: str
    ) -> Iterator[RawBatch]:
        """The rows from `offset` on, each with the problem, and its id if that is readable."""
        if place.rows - offset > MOST_UNREADABLE:
            raise InputError(
                f"{place} cannot be read within {self._memory_bytes >> 20} MiB ({reason}); write "
                f"the file again with {place.smaller}, or raise SPECBATCH_INGEST_MEMORY_MIB"
            )
        problem = (
            "unreadable",
            f"{place} cannot be read from row {offset} on within {self._memory_bytes >> 20} MiB "
            f"({reason}): write the file again with smaller values or {place.smaller}",
        )
        for ids in (
            _repeated(None, place.rows - offset)
            if self._id is None
            else self._ids(reader, place, offset, None)
        ):
            rows = [RawRow(None if i == NO_ID else i, problem=problem) for i in ids]
            offsets = range(offset, offset + len(rows) + 1)
            info = place.info
            yield RawBatch(info.uri, info.version, place.number, offsets, kind, rows)
            offset += len(rows)

    def _raw(self, place: _Group, offset: int, found: Rows, kind: PromptKind) -> RawBatch:
        batch, info, spec = found.batch, place.info, self._spec
        problems: dict[int, tuple[str, str]] = {}

        def column(name: str | None, read: Callable[[pa.Array], list[Any]] = plain) -> list[Any]:
            values = [None] * batch.num_rows if name is None else read(batch.column(name))
            for row, value in enumerate(values):
                if isinstance(value, NoValue):
                    values[row] = None
                    problems[row] = "unreadable", f"column `{name}` cannot be read: {value.reason}"
            return values

        rows = [
            RawRow(row_id, prompt, seed, tag, sampling=sampling)
            for row_id, prompt, seed, tag, sampling in zip(
                column(self._id), column(spec.read_prompt_column), column(spec.seed_column),
                column(self._tag), column(spec.sampling_column), strict=True,
            )
        ]  # fmt: skip
        cells = {name: column(name, plain_cells) for name in columns_of(spec)}
        for at, raw in enumerate(rows if cells else ()):
            raw.columns = {name: values[at] for name, values in cells.items()}
        for row, problem in problems.items():
            rows[row].problem = problem
        for row, sizes in found.long.items():
            name, size = next(iter(sizes.items()))
            rows[row].problem = (
                "too_long",
                f"column `{name}` has {size} bytes here; at most {MAX_ROW_BYTES} are read",
            )
        offsets = range(offset, offset + batch.num_rows + 1)
        return RawBatch(info.uri, info.version, place.number, offsets, kind, rows)

    def _columns(self) -> list[str]:
        spec = self._spec
        named = [spec.read_prompt_column, self._id, spec.seed_column, self._tag]
        named += [spec.sampling_column, *columns_of(spec)]
        return list(dict.fromkeys(name for name in named if name is not None))

    def _check_columns(self, uri: str, schema: pa.Schema) -> PromptKind:
        check_columns(self._spec, uri, schema.names)
        check_there(uri, schema.names, self._columns())
        seed = self._spec.seed_column
        if seed and not pa.types.is_integer(schema.field(seed).type):
            raise InputError(
                f"column `{seed}` of {uri} is {schema.field(seed).type}; seeds must be integers"
            )
        sampling = self._spec.sampling_column
        if sampling and not _is_sampling(schema.field(sampling).type):
            raise InputError(
                f"column `{sampling}` of {uri} is {schema.field(sampling).type}; "
                "sampling values must be a struct or JSON text"
            )
        for name in filter(None, (self._id, self._tag)):
            if pa.types.is_nested(schema.field(name).type):
                raise InputError(
                    f"column `{name}` of {uri} is {schema.field(name).type}; "
                    "ids and tags must be strings or numbers"
                )
        if self._spec.read_prompt_column is None:
            return "messages" if self._spec.writes_messages else "text"
        prompt = schema.field(self._spec.prompt_column)
        wanted = "text" if self._spec.system is not None else self._spec.prompt_kind
        kind = prompt_kind(prompt.type, wanted)
        if kind is None:
            accepted = "; or ".join(_ACCEPTED.values()) if wanted == "auto" else _ACCEPTED[wanted]
            raise InputError(
                f"column `{prompt.name}` of {uri} is {prompt.type}; accepted: {accepted}"
            )
        return kind

    @contextmanager
    def _open(self, info: ObjectInfo) -> Iterator[tuple[ColumnarReader, FileFacts]]:
        try:
            file = self._objects.open(info.uri, info.version)
        except ObjectError as error:
            raise as_input_error(error) from error
        with file:
            child = self._spare.pop() if self._spare else None
            reader = ColumnarReader(file, self._kind, self._memory_bytes, child)
            self._readers.add(reader)
            try:
                yield reader, self._facts(reader, info)
                if (child := reader.release()) is not None:
                    self._spare.append(child)
            finally:
                reader.close()

    def _facts(self, reader: ColumnarReader, info: ObjectInfo) -> FileFacts:
        try:
            facts = reader.facts()
            return facts if self._layout is None else self._layout.filled(info.uri, facts)
        except ObjectError as error:
            raise as_input_error(error) from error
        except KilledError as error:
            raise InputError(
                f"{info.uri} failed to read twice, perhaps not because of the file: {error}; "
                "free memory on this machine, then submit the job again"
            ) from error
        except UnreadableError as error:
            raise InputError(f"{info.uri} cannot be read: {error}") from error
        except (DamagedError, LimitError, OSError) as error:
            raise InputError(
                f"{info.uri} is truncated or not {_NAMES[self._kind]}; write it again, or leave it "
                "out"
            ) from error


@dataclass(frozen=True, slots=True)
class _Group:
    """A group of a file."""

    info: ObjectInfo
    facts: FileFacts
    number: int

    @property
    def rows(self) -> int:
        return self.facts.groups[self.number].rows

    @property
    def name(self) -> str:
        return _GROUPS[self.facts.kind][0]

    @property
    def smaller(self) -> str:
        return f"smaller {_GROUPS[self.facts.kind][1]}"

    def stored(self, columns: list[str]) -> list[str]:
        """Those that the file has; any other one, if it has none: it counts the rows."""
        found = [name for name in columns if name not in self.facts.constants]
        others = (name for name in self.facts.schema.names if name not in self.facts.constants)
        return found or list(islice(others, 1))

    def whole(self, rows: Rows, columns: list[str]) -> Rows:
        """The rows with the columns that the file lacks."""
        constants = self.facts.constants
        if not constants:
            return rows
        count = rows.batch.num_rows
        arrays = [
            pa.repeat(constants[name], count) if name in constants else rows.batch.column(name)
            for name in columns
        ]
        return Rows(pa.RecordBatch.from_arrays(arrays, names=columns), rows.long)

    def batch_rows(self, columns: list[str]) -> int:
        """Rows per batch, fewer where rows are large. Arrow does not say how large they are."""
        sizes = self.facts.groups[self.number].bytes
        size = sum(sizes[path] for path in sizes if path.startswith(tuple(columns)))
        return max(1, min(ROWS_PER_BATCH, BYTES_PER_BATCH * self.rows // max(1, size)))

    def __str__(self) -> str:
        return f"{self.name} {self.number} of {self.info.uri}"


def _check_keepable(field: pa.Field) -> None:
    """Raise `InputError` for a type that Parquet does not have, such as a union, or whose rows
    Arrow cannot pick, such as a view of lists."""
    try:
        if pa.types.is_list_view(field.type) or pa.types.is_large_list_view(field.type):
            raise pa.ArrowNotImplementedError("a view of lists")
        pq.write_table(pa.schema([field]).empty_table(), pa.BufferOutputStream())
        pa.array([], plainly(field.type)).take(pa.array([], pa.int64()))
    except (pa.ArrowException, NotImplementedError):
        raise InputError(
            f"column `{field.name}` cannot be kept: it is {field.type}, which an output cannot "
            "hold; leave it out, or change its type"
        ) from None


def _kept(
    place: _Group, offset: int, found: Rows | str, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The rows that were read; null for the rest of a group that cannot be read."""
    if isinstance(found, str):
        log.warning("%s: kept columns are null from row %d on: %s", place, offset, found)
        for nulls in _repeated(None, place.rows - offset):
            columns = [pa.nulls(len(nulls), field.type) for field in schema]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)
        return
    for row, sizes in found.long.items():
        log.warning(
            "%s: kept %s of row %d too large, so null", place, ", ".join(sizes), offset + row
        )
    columns = []
    for field in schema:
        column = found.batch.column(field.name)
        if column.type != field.type and pa.types.is_dictionary(column.type):  # as text may come
            column = column.dictionary_decode()
        columns.append(column if column.type == field.type else column.cast(field.type))
    yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _repeated(value: Any, count: int) -> Iterator[list[Any]]:
    while count > 0:
        yield [value] * min(count, ROWS_PER_BATCH)
        count -= ROWS_PER_BATCH


def prompt_kind(kind: pa.DataType, wanted: PromptKind) -> PromptKind | None:
    """The kind of prompt in a column of this type; None if it cannot be the wanted one."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if is_text(kind):
        return None if wanted == "token_ids" else "messages" if wanted == "messages" else "text"
    if not is_list(kind):
        return None
    item = kind.value_type
    if pa.types.is_integer(item):
        return "token_ids" if wanted in ("auto", "token_ids") else None
    if pa.types.is_struct(item) and {"role", "content"} <= {f.name for f in item}:
        return "messages" if wanted in ("auto", "messages") else None
    return None


@dataclass(frozen=True, slots=True)
class NoValue:
    """Stands for a value that Python does not have, such as a day of the year 10000."""

    reason: str


def plain(column: pa.Array) -> list[Any]:
    """Python values. Text that is not valid UTF-8 stays `bytes`, and a value that Python does not
    have is a `NoValue`: both mark their row."""
    if pa.types.is_dictionary(column.type):  # one object for all rows with this value
        values = plain(column.dictionary)
        return [None if i is None else values[i] for i in column.indices.to_pylist()]
    if is_text(column.type) and not pa.types.is_string(column.type):
        column = column.cast(pa.large_binary())
    try:
        values = column.to_pylist()
    except (ValueError, OverflowError):  # UnicodeDecodeError is one
        if not pa.types.is_string(column.type):
            return [_alone(item) for item in column]
        values = column.cast(pa.binary()).to_pylist()
    return [_text(value) if isinstance(value, bytes) else value for value in values]


def plain_cells(column: pa.Array) -> list[Any]:
    """The same as `plain` for a column that a template names.

    Times are in microseconds, as Python has them, and those with a zone in UTC, whose names need no
    files of this machine. A float32 is the number that its shortest text names: 0.1, where the
    nearest float64 is 0.10000000149011612.
    """
    kind, texts = (
        changed_within(column.type, _in_python),
        changed_within(column.type, _float_as_text),
    )
    try:
        for wanted in (texts, kind):
            if wanted != column.type:
                column = column.cast(options=pc.CastOptions(wanted, allow_time_truncate=True))
    except pa.ArrowInvalid as error:  # a time that microseconds do not reach
        if len(column) == 1:
            return [NoValue(str(error))]
        return [value for at in range(len(column)) for value in plain_cells(column.slice(at, 1))]
    return plain(column)


def _float_as_text(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_float32(kind) else kind


def _in_python(kind: pa.DataType) -> pa.DataType:
    """The type in Python's units, numbers and zone."""
    if pa.types.is_float32(kind):
        return pa.float64()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if pa.types.is_time64(kind):
        return pa.time64("us")
    return pa.duration("us") if pa.types.is_duration(kind) else kind


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _alone(item: pa.Scalar) -> Any:
    try:
        return item.as_py()
    except UnicodeDecodeError:
        return b""
    except (ValueError, OverflowError) as error:
        return NoValue(str(error))


def _is_sampling(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return is_text(kind) or bool(pa.types.is_struct(kind))


@contextmanager
def _damage_named(place: _Group, reader: ColumnarReader) -> Iterator[None]:
    """Name the place where the reader or the store fails; our own errors pass through. A file that
    was written to meanwhile is not damaged."""
    try:
        yield
    except (DamagedError, OSError) as error:
        reader.check_unchanged(place.info)
        raise InputError(f"{place} is damaged; write the file again, or leave it out") from error
    except ObjectError as error:
        raise as_input_error(error) from error
