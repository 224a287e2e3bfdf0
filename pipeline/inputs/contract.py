"""The contract of input readers.

A source knows files, columns and positions. It does not know which rows are good (`rows.py`) or
how they are grouped (`planner.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from specbatch.pipeline.storage.object_store import ObjectInfo
from specbatch.schemas.errors import InputError, ObjectError, SpecbatchError
from specbatch.schemas.records import SourcePosition

if TYPE_CHECKING:
    import pyarrow as pa

PromptKind = Literal["auto", "text", "token_ids", "messages"]
Format = Literal["parquet", "arrow", "csv", "jsonl", "openai", "openai-completions"]

ROWS_PER_BATCH = 4096
BYTES_PER_BATCH = 8 << 20  # of input, roughly
READER_BYTES = 768 << 20
MAX_ROW_BYTES = 16 << 20  # of a line, or of a cell: more than fits any context
INPUT_FILES = "input_files"  # key of a job's report: a digest of their names and versions
NO_ID = "\0"  # stands for the id of a row that could not be read: no good row may have it


class RowError(SpecbatchError):
    """A row is rejected; `code` is its reject code (`rows.py`)."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(slots=True)
class RawRow:
    """One row as read. Text that is not valid UTF-8 stays `bytes`.

    `body` is the request of an OpenAI row; `problem` is a (code, reason) that rejects the row.
    """

    id: Any = None
    prompt: Any = None
    seed: Any = None
    tag: Any = None
    body: dict[str, Any] | None = None
    problem: tuple[str, str] | None = None
    sampling: Any = None  # its own sampling values: an object, or JSON text
    columns: dict[str, Any] | None = None  # all that the templates name, by name

    @property
    def is_nameless(self) -> bool:
        """Whether the row is rejected without an id, so that its number cannot serve as one."""
        return self.problem is not None and (self.id is None or self.id == "")


@dataclass(slots=True)
class RawBatch:
    """Consecutive rows of one row group (Parquet, Arrow) or file (JSONL, CSV)."""

    uri: str
    version: str
    row_group: int  # always 0 in files of text
    offsets: Sequence[int]  # [rows + 1] row in the group, or byte in the text
    kind: PromptKind
    rows: list[RawRow] = field(default_factory=list)

    def parts(self, rows: int) -> Iterator[RawBatch]:
        """The same rows in parts of at most `rows` rows."""
        for first in range(0, max(1, len(self.rows)), rows):
            yield self.part(first, first + rows)

    def part(self, first: int, stop: int) -> RawBatch:
        """Its rows from `first` to `stop`."""
        rows = self.rows[first:stop]
        offsets = self.offsets[first : first + len(rows) + 1]
        return RawBatch(self.uri, self.version, self.row_group, offsets, self.kind, rows)

    def position(self, index: int) -> SourcePosition:
        """Where row `index` begins; `len(rows)` gives where the next batch begins."""
        return SourcePosition(self.uri, self.version, self.row_group, self.offsets[index])


@dataclass(frozen=True, slots=True)
class ReadColumns:
    """The columns of an input's first file, and those that a job makes prompts of."""

    there: tuple[tuple[str, str | None], ...]  # name and type; None: the format has no types
    id: str | None
    prompt: tuple[str, ...]


class Source(Protocol):
    """The rows of one input, in order of file name, row group and row.

    Each row has the columns that `columns_of` (`prompt_template.py`) names for the input's spec, as
    plain Python values; a value that is absent is None. `check` refuses an input without them
    (`check_columns`). The prompt column is read only where `read_prompt_column` names it.
    """

    format: Format
    files: list[ObjectInfo]
    has_ids: bool  # rows carry ids of their own, which may repeat

    def check(self) -> None:
        """Check without reading rows. Raise `InputError` for what is missing or unreadable.

        All methods raise `ObjectError` if the store is out of reach for a while.
        """
        ...

    def read(self, start: SourcePosition | None = None) -> Iterator[RawBatch]:
        """All rows from `start` on, in bounded memory.

        Raises `InputError` for a damaged row group, or when the file of `start` has changed.
        """
        ...

    def ids_until(self, position: SourcePosition) -> Iterator[list[Any]]:
        """The ids of all rows before `position`, `NO_ID` for rows that have no id at all.

        Reads nothing else if the format allows it.
        """
        ...

    def kept_schema(self, wanted: Sequence[str] | None) -> pa.Schema:
        """The types of these columns (or fields), of all if `None`. Raises `InputError`."""
        ...

    def kept_rows(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """These columns of all rows, in the order of `read`, in bounded memory.

        A cell that is too large to be read is null.
        """
        ...

    def columns(self) -> ReadColumns:
        """Which columns there are and which are read; complete once `check` was called."""
        ...

    def pause(self) -> None:
        """End the reader processes. The next read starts them where they stopped."""
        ...


def files_digest(files: Sequence[ObjectInfo]) -> str:
    """SHA-256 of the files' names and versions."""
    said = "".join(f"{info.uri}\0{info.version}\0" for info in files)
    return hashlib.sha256(said.encode()).hexdigest()


def files_from(files: list[ObjectInfo], start: SourcePosition | None) -> list[ObjectInfo]:
    """The files still to read. Raises `InputError` if the file to resume in has changed."""
    if start is None:
        return files
    for index, info in enumerate(files):
        if info.uri == start.uri:
            if info.version != start.version:
                raise changed_since(info.uri)
            return files[index:]
    raise gone_since(start.uri)


def check_same_files(files: list[ObjectInfo], report: Mapping[str, Any]) -> None:
    """Raise `InputError` unless these are the files that the job of this report began to read."""
    known = report.get(INPUT_FILES)
    if known is not None and known != files_digest(files):
        raise InputError(
            "files of the input were added, removed or changed since this job began reading it; "
            "make them as they were and use `specbatch retry`, or submit a new job"
        )


def changed_since(uri: str) -> InputError:
    """The error for an input that changed since earlier rows were read."""
    return InputError(
        f"{uri} changed since this job began reading it; put the original back, or submit a new job"
    )


def gone_since(uri: str) -> InputError:
    """The error for a file of the input that is no longer there."""
    return InputError(
        f"{uri} is gone since this job began reading it; put it back, or submit a new job"
    )


def as_input_error(error: ObjectError) -> InputError | ObjectError:
    """A user must repair an input that cannot be read, unless the error passes: then it stays an
    `ObjectError`, and the reader tries again later."""
    return ObjectError(str(error), passing=True) if error.passing else InputError(str(error))
