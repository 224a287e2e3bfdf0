"""Reads rows of CSV and TSV files, compressed with gzip or not.

The first row of each file names its columns, and every cell is text. Python's csv module splits the
rows, strictly: a row that it refuses is a bad row, not a bad file, and reading resumes at the line
after the one where the row went wrong. Blank lines are not rows. Positions are byte offsets in the
text, so a resume seeks straight to one.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO

from specbatch.pipeline.inputs.contract import (
    BYTES_PER_BATCH,
    MAX_ROW_BYTES,
    NO_ID,
    ROWS_PER_BATCH,
    Format,
    PromptKind,
    RawBatch,
    RawRow,
    ReadColumns,
    files_from,
)
from specbatch.pipeline.inputs.prompt_template import check_columns, columns_of, prompt_columns
from specbatch.pipeline.inputs.text_files import (
    BOM,
    GZIP,
    check_unchanged,
    open_text,
    reading,
)
from specbatch.pipeline.storage.object_store import ObjectInfo
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.errors import InputError
from specbatch.schemas.records import SourcePosition
from specbatch.schemas.spec import InputSpec

if TYPE_CHECKING:
    import pyarrow as pa

MAX_RECORD_BYTES = MAX_ROW_BYTES
TSV = ".tsv"
_ROWS_CHECKED = 100  # by the preflight, per file
_PASSED_BY_BYTES = 1 << 20
_QUOTE = re.compile(b'"')
_NOT_UTF8 = re.compile(
    "[\udc80-\udcff]"
)  # bytes that are not text, as `surrogateescape` reads them

Problem = tuple[str, str]  # a reject code and its reason
Cells = list[str]


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a file, and where it begins and ends in bytes."""

    start: int
    end: int
    cells: Cells | Problem


class CsvSource:
    """A list of CSV or TSV files, each with a header."""

    format: Format = "csv"

    def __init__(self, spec: InputSpec, objects: Objects, files: list[ObjectInfo]):
        self.files = files
        self._spec = spec
        self._objects = objects
        if spec.prompt_kind == "token_ids":
            raise InputError(
                "cells of CSV files are text, and input.prompt_kind is token_ids: write token ids "
                "to Parquet, Arrow or JSONL"
            )
        self._kind: PromptKind = "messages" if spec.prompt_kind == "messages" else "text"
        first = self._header(files[0])
        self._first = tuple((name, "string") for name in first)
        self._id = spec.id_column or ("id" if "id" in first else None)
        self._tag = spec.tag_column or ("tag" if "tag" in first else None)
        self.has_ids = self._id is not None

    @cached_property
    def _named(self) -> tuple[str, ...]:
        """The columns that the templates name."""
        return columns_of(self._spec)

    def check(self) -> None:
        for info in self.files:
            self._check_file(info)

    def columns(self) -> ReadColumns:
        return ReadColumns(self._first, self._id, prompt_columns(self._spec))

    def read(self, start: SourcePosition | None = None) -> Iterator[RawBatch]:
        for info in files_from(self.files, start):
            begin = start.row_offset if start is not None and info.uri == start.uri else 0
            for header, records in self._chunks(info, begin):
                places = self._places(info, header)
                rows = [self._row(record.cells, places, len(header)) for record in records]
                yield RawBatch(info.uri, info.version, 0, _offsets(records), self._kind, rows)

    def ids_until(self, position: SourcePosition) -> Iterator[list[Any]]:
        if self._id is None:
            return
        for info in self.files:
            here = info.uri == position.uri
            for header, records in self._chunks(info, 0):
                places = self._places(info, header)
                keep = [r for r in records if not here or r.start < position.row_offset]
                rows = [self._row(record.cells, places, len(header)) for record in keep]
                yield [NO_ID if row.is_nameless else row.id for row in rows]
                if here and records[-1].end >= position.row_offset:
                    return
            if here:
                return

    def kept_schema(self, wanted: Sequence[str] | None) -> pa.Schema:
        import pyarrow as pa  # who only submits has none

        from specbatch.pipeline.inputs.kept import common_schema

        found = (
            (info, pa.schema([pa.field(name, pa.string()) for name in self._header(info)]))
            for info in self.files
        )
        return common_schema(found, wanted, self._id)

    def kept_rows(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for info in self.files:
            for header, records in self._chunks(info, 0):
                cells = [_fitting(record.cells, len(header)) for record in records]
                columns = [
                    pa.array(_column(cells, header.index(name)), pa.string())
                    for name in schema.names
                ]
                yield pa.RecordBatch.from_arrays(columns, schema=schema)

    def pause(self) -> None:
        """Nothing to do: no other process reads these files."""

    def is_empty(self) -> bool:
        """Whether no file has a row below its header. Raises as `check` does."""
        return not any(map(self._has_row, self.files))

    def _has_row(self, info: ObjectInfo) -> bool:
        return next(self._chunks(info, 0), None) is not None

    def _check_file(self, info: ObjectInfo) -> None:
        rows = good = size = 0
        first: Problem | None = None
        with reading(info), open_text(self._objects, info) as file:
            header = self._read_header(info, file)
            self._places(info, header)
            for record in self._records(info, file):
                rows, size = rows + 1, size + record.end - record.start
                problem = _problem(record.cells, len(header))
                first, good = first or problem, good + (problem is None)
                if rows >= _ROWS_CHECKED or size >= BYTES_PER_BATCH:
                    break
        if rows and not good and first is not None:
            raise InputError(
                f"none of the first {rows} rows of {info.uri} can be read: {first[1]}; "
                "is input.delimiter right?"
            )

    def _chunks(self, info: ObjectInfo, begin: int) -> Iterator[tuple[Cells, list[Record]]]:
        """(header, rows from offset `begin` on) in bounded pieces, none empty.

        Raises `InputError` if the file was written to meanwhile.
        """
        records: list[Record] = []
        size = 0
        with reading(info), open_text(self._objects, info) as file:
            header = self._read_header(info, file)
            if begin > file.tell():
                file.seek(begin)
            for record in self._records(info, file):
                records.append(record)
                size += record.end - record.start if isinstance(record.cells, list) else 0
                if len(records) >= ROWS_PER_BATCH or size >= BYTES_PER_BATCH:
                    check_unchanged(file, info)
                    yield header, records
                    records, size = [], 0
            check_unchanged(file, info)
        if records:
            yield header, records

    # --- the header -------------------------------------------------------------------------
    def _header(self, info: ObjectInfo) -> Cells:
        with reading(info), open_text(self._objects, info) as file:
            return self._read_header(info, file)

    def _read_header(self, info: ObjectInfo, file: BinaryIO) -> Cells:
        """The names of a file's columns; the file is then at the first row."""
        if file.read(len(BOM)) != BOM:
            file.seek(0)
        first = next(self._records(info, file), None)
        if first is None:
            raise InputError(
                f"{info.uri} is empty: a CSV file begins with the names of its columns"
            )
        if isinstance(first.cells, tuple):
            raise InputError(f"{info.uri} does not begin with a header: {first.cells[1]}")
        if any(map(_NOT_UTF8.search, first.cells)):
            raise InputError(f"the header of {info.uri} is not UTF-8; save the file as UTF-8")
        file.seek(first.end)
        return first.cells

    def _places(self, info: ObjectInfo, header: Cells) -> dict[str, int]:
        """The number of each column that is needed. Raises `InputError`."""
        spec = self._spec
        check_columns(spec, info.uri, header)
        named = (
            *(spec.read_prompt_column, self._id, spec.seed_column, self._tag),
            *(spec.sampling_column, *self._named),
        )
        places = {}
        for name in filter(None, named):
            if name not in header:
                raise InputError(
                    f"{info.uri} has no column `{name}`; its columns are {', '.join(header)}"
                    + ("" if len(header) > 1 else "; is input.delimiter right?")
                )
            if header.count(name) > 1:
                raise InputError(f"{info.uri} has several columns `{name}`; rename all but one")
            places[name] = header.index(name)
        return places

    # --- rows -------------------------------------------------------------------------------
    def _records(self, info: ObjectInfo, file: BinaryIO) -> Iterator[Record]:
        name = info.uri.removesuffix(GZIP)
        return records(file, self._spec.delimiter or ("\t" if name.endswith(TSV) else ","))

    def _row(self, cells: Cells | Problem, places: dict[str, int], width: int) -> RawRow:
        problem = _problem(cells, width)
        if problem is not None or isinstance(cells, tuple):
            return RawRow(problem=problem)

        def cell(name: str | None) -> str | bytes | None:
            return None if name is None else _plain(cells[places[name]])

        return RawRow(
            cell(self._id),
            cell(self._spec.read_prompt_column),
            _seed(cell(self._spec.seed_column)),
            cell(self._tag) or None,
            sampling=cell(self._spec.sampling_column) or None,
            columns={name: cell(name) for name in self._named} or None,
        )


def records(file: BinaryIO, delimiter: str) -> Iterator[Record]:
    """The rows from where the file is; of one that cannot be read, the reason."""
    csv.field_size_limit(MAX_RECORD_BYTES)  # of the whole process; 128 KiB otherwise
    lines = _Lines(file)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        start = lines.begin()
        cells: Cells | Problem
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            cells = "bad_csv", f"the row is not CSV: {_words(error, len(lines.read))}"
        except _TooLongError:
            lines.end = _pass_by(file, start, lines.read, delimiter.encode())
            size = lines.end - start
            cells = "too_long", f"the row has {size} bytes; at most {MAX_RECORD_BYTES} are read"
        if cells:
            yield Record(start, lines.end, cells)


class _TooLongError(Exception):
    """A row is longer than the reader keeps."""


class _Lines:
    """The lines that the csv module asks for, and where the last of them ends."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.end = self._start = file.tell()
        self.read: list[bytes] = []  # of this row; the last may be cut

    def begin(self) -> int:
        """A row begins here."""
        self._start, self.read = self.end, []
        return self._start

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        left = MAX_RECORD_BYTES - (self.end - self._start)
        line = self._file.readline(left + 1)
        if not line:
            raise StopIteration
        self.read.append(line)
        if len(line) > left:
            raise _TooLongError
        self.end += len(line)
        return line.decode("utf-8", "surrogateescape")


def _pass_by(file: BinaryIO, start: int, read: Sequence[bytes], delimiter: bytes) -> int:
    """Where the row ends that begins at `start` with what was `read`; the file is then there.

    As for the csv module, a quote opens a cell only at its beginning, and two within are one. The
    file is read forward only: in a gzip file every step back would begin at its first byte.
    """
    at, closed, is_open, last = start, -1, False, delimiter
    rest = iter(lambda: file.readline(_PASSED_BY_BYTES), b"")
    for number, piece in enumerate(chain(read, rest), 1):
        for quote in _QUOTE.finditer(piece):
            place = quote.start()
            before = piece[place - 1 : place] if place else last
            if is_open:
                is_open, closed = False, at + place
            elif before == delimiter or closed == at + place - 1:
                is_open = True
        at += len(piece)
        last = piece[-1:]
        if last == b"\n" and not is_open and number >= len(read):
            break
    return at


def _words(error: csv.Error, lines: int) -> str:
    words = "a quote is not closed" if "end of data" in str(error) else str(error)
    if "new-line" in words:
        words = "a line ends in CR alone; write the file again with LF"
    return words + (f", in a row of {lines} lines" if lines > 1 else "")


def _problem(cells: Cells | Problem, width: int) -> Problem | None:
    if isinstance(cells, tuple):
        return cells
    if len(cells) != width:
        count = f"{len(cells)} cell" + "s" * (len(cells) != 1)
        return "bad_csv", f"the row has {count}, and the header has {width}"
    return None


def _fitting(cells: Cells | Problem, width: int) -> Cells | None:
    return cells if isinstance(cells, list) and len(cells) == width else None


def _column(rows: list[Cells | None], place: int) -> list[str | None]:
    """The text of one column; bytes that are not UTF-8 become replacement characters."""
    return [None if row is None else _NOT_UTF8.sub("\N{REPLACEMENT CHARACTER}", row[place])
            for row in rows]  # fmt: skip


def _plain(cell: str) -> str | bytes:
    """Text that is not UTF-8 stays bytes, which marks its row."""
    return cell.encode("utf-8", "surrogateescape") if _NOT_UTF8.search(cell) else cell


def _seed(cell: str | bytes | None) -> Any:
    """The number that a cell spells, None for an empty cell, or the cell itself."""
    if not cell:
        return None
    is_number = isinstance(cell, str) and cell.isascii() and cell.isdigit() and len(cell) <= 19
    return int(cell) if is_number else cell


def _offsets(records: list[Record]) -> list[int]:
    return [*(record.start for record in records), records[-1].end]
