"""Where rows come from: finding the files, naming the format, one contract for every reader.

A source knows files, columns and positions. It does not know which rows are good (`rows.py`) or
how they are grouped (`planner.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import orjson

from specbatch.pipeline.inputs.folders import (
    is_glob,
    is_hidden,
    local_files,
    local_matches,
    split_glob,
    wanted_suffixes,
)
from specbatch.pipeline.storage.objects import ObjectInfo, Objects, tidy
from specbatch.schemas.errors import InputError, ObjectError
from specbatch.schemas.records import SourcePosition
from specbatch.schemas.spec import InputSpec

PromptKind = Literal["auto", "text", "token_ids", "messages"]
Format = Literal["parquet", "jsonl", "openai"]

ROWS_PER_BATCH = 4096
BYTES_PER_BATCH = 8 << 20  # of input, roughly
READER_BYTES = 768 << 20
MAX_ROW_BYTES = 16 << 20  # of a line, or of a cell: more than fits any context
NO_ID = "\0"  # stands for the id of a row that could not be read: no good row may have it


@dataclass(slots=True)
class RawRow:
    """One row as it was read. Text that is not valid UTF-8 stays `bytes`.

    `body` is the request of an OpenAI row; `problem` is a (code, reason) that already ends the row.
    """

    id: Any = None
    prompt: Any = None
    seed: Any = None
    tag: Any = None
    body: dict[str, Any] | None = None
    problem: tuple[str, str] | None = None
    sampling: Any = None  # its own sampling values: an object, or JSON text

    @property
    def is_nameless(self) -> bool:
        """Whether it ends without an id, and so without the row number that would be one."""
        return self.problem is not None and (self.id is None or self.id == "")


@dataclass(slots=True)
class RawBatch:
    """Consecutive rows of one row group (Parquet) or file (JSONL)."""

    uri: str
    version: str
    row_group: int  # always 0 in JSONL
    offsets: Sequence[int]  # [rows + 1] row in the group, or byte in the JSONL file
    kind: PromptKind
    rows: list[RawRow] = field(default_factory=list)

    def parts(self, rows: int) -> Iterator[RawBatch]:
        """The same rows, at most so many at a time."""
        for first in range(0, max(1, len(self.rows)), rows):
            part = self.rows[first : first + rows]
            offsets = self.offsets[first : first + len(part) + 1]
            yield RawBatch(self.uri, self.version, self.row_group, offsets, self.kind, part)

    def position(self, index: int) -> SourcePosition:
        """Where row `index` begins; `len(rows)` gives where the next batch begins."""
        return SourcePosition(self.uri, self.version, self.row_group, self.offsets[index])


class Source(Protocol):
    """The rows of one input, in order of file name, row group and row."""

    format: Format
    files: list[ObjectInfo]
    has_ids: bool  # rows carry ids of their own, which may repeat

    def check(self) -> None:
        """Preflight without reading rows: raise `InputError` for what is missing or unreadable.

        Here and below a store that is out of reach for a while raises `ObjectError` instead.
        """
        ...

    def read(self, start: SourcePosition | None = None) -> Iterator[RawBatch]:
        """All rows from `start` on, in bounded memory.

        Raises `InputError` for a damaged row group, or when the file of `start` has changed.
        """
        ...

    def ids_until(self, position: SourcePosition) -> Iterator[list[Any]]:
        """The ids of all rows before `position`, `NO_ID` for those without even a number; reads
        nothing else where the format allows."""
        ...

    def pause(self) -> None:
        """End the processes that read it; what is read further starts them where they were."""
        ...


def open_source(spec: InputSpec, objects: Objects, memory_bytes: int = READER_BYTES) -> Source:
    """Find the input's files and choose the reader. `memory_bytes`: what decoding may take.

    Raises `InputError` when there are none, and `ObjectError` where the store may answer later.
    """
    from specbatch.pipeline.inputs.jsonl_source import JsonlSource
    from specbatch.pipeline.inputs.parquet_source import ParquetSource

    files = _find(spec, objects)
    name = _format(spec, files, objects)
    if name == "parquet":
        return ParquetSource(spec, objects, files, memory_bytes)
    return JsonlSource(spec, objects, files, name)


def files_from(files: list[ObjectInfo], start: SourcePosition | None) -> list[ObjectInfo]:
    """The files still to read; raises `InputError` when the one to resume in is not as it was."""
    if start is None:
        return files
    for index, info in enumerate(files):
        if info.uri == start.uri:
            if info.version != start.version:
                raise changed_since(info.uri)
            return files[index:]
    raise InputError(
        f"{start.uri} is gone since this job began reading it; put it back, or submit a new job"
    )


def changed_since(uri: str) -> InputError:
    """The error for an input that is not what the rows before were read from."""
    return InputError(
        f"{uri} changed since this job began reading it; put the original back, or submit a new job"
    )


def as_input_error(error: ObjectError) -> InputError | ObjectError:
    """An input that cannot be read is the user's to mend, unless that passes: then whoever reads it
    does so again later."""
    return ObjectError(str(error), passing=True) if error.passing else InputError(str(error))


# --- finding files ------------------------------------------------------------------------------
def _find(spec: InputSpec, objects: Objects) -> list[ObjectInfo]:
    uri = tidy(spec.uri)
    if uri.startswith("s3://") and "/" not in uri.removeprefix("s3://"):
        uri += "/"  # a whole bucket
    try:
        if uri.startswith("s3://") and is_glob(uri):
            return _find_s3_glob(uri, spec, objects)
        if not uri.endswith("/") and (info := objects.head(uri)):
            return [info]
        if "://" in uri:
            return _folder(uri, spec, objects.list(uri.rstrip("/") + "/"))
        if is_glob(uri) and not Path(uri).is_dir():
            return _matched(uri, _infos(local_matches(uri), objects))
        return _folder(uri, spec, _infos(local_files(Path(uri)), objects))
    except ObjectError as error:
        raise as_input_error(error) from error


def _find_s3_glob(uri: str, spec: InputSpec, objects: Objects) -> list[ObjectInfo]:
    """By one list and no look at a key: where only listing by prefix is granted, S3 refuses to say
    that there is no such key."""
    root, pattern = split_glob(uri)
    listed = objects.list(root)
    folder = uri.rstrip("/") + "/"
    if exact := [info for info in listed if info.uri == uri]:
        return exact
    if below := [info for info in listed if info.uri.startswith(folder)]:
        return _folder(uri, spec, below)
    whole = _glob_pattern(uri)
    found = [info for info in listed if whole.fullmatch(info.uri)]
    return _matched(uri, [i for i in found if not is_hidden(i.uri.removeprefix(root), pattern)])


def _infos(paths: list[Path], objects: Objects) -> list[ObjectInfo]:
    return [info for path in paths if (info := objects.head(str(path)))]


def _matched(uri: str, files: list[ObjectInfo]) -> list[ObjectInfo]:
    if not files:
        raise InputError(f"no file matches input {uri}")
    return files


def _folder(uri: str, spec: InputSpec, listed: list[ObjectInfo]) -> list[ObjectInfo]:
    """What is meant of a folder's files."""
    root = "" if uri == "." else uri.rstrip("/") + "/"
    found = [info for info in listed if not is_hidden(info.uri.removeprefix(root))]
    wanted = wanted_suffixes(spec.format)
    files = [info for info in found if info.uri.endswith(wanted)]
    if not found:
        raise InputError(f"input {spec.uri} does not exist or is empty")
    if not files:
        names = " or ".join(f"*{suffix}" for suffix in wanted)
        raise InputError(f"input folder {spec.uri} holds no {names} files")
    if len({info.uri.rpartition(".")[2] for info in files}) > 1:
        raise InputError(
            f"input folder {spec.uri} holds both Parquet and JSONL; set input.format to choose"
        )
    return files


def _glob_pattern(glob: str) -> re.Pattern[str]:
    """`*` stays within a folder, `**` does not. Raises `InputError`."""
    parts = re.split(r"(\*\*/?|\*|\?|\[[^\]]+\])", glob)
    meaning = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    written = "".join(
        meaning.get(part) or (part.replace("[!", "[^") if part[:1] == "[" else re.escape(part))
        for part in parts
    )
    try:
        return re.compile(written)
    except re.error as error:
        raise InputError(f"input {glob} is not a glob: {error.msg}") from None


# --- naming the format --------------------------------------------------------------------------
def _format(spec: InputSpec, files: list[ObjectInfo], objects: Objects) -> Format:
    if spec.format != "auto":
        return spec.format
    try:
        with objects.open(files[0].uri) as file:
            head = file.read(4)
            if files[0].uri.endswith(".parquet") or head == b"PAR1":
                return "parquet"
            file.seek(0)
            line = _first_line(file)
    except ObjectError as error:
        raise as_input_error(error) from error
    if line is None and not files[0].uri.endswith(".jsonl"):
        raise InputError(
            f"{files[0].uri} is neither Parquet nor JSONL; set input.format if it is one of them"
        )
    return "openai" if line and "custom_id" in line and "body" in line else "jsonl"


def _first_line(file: Any) -> dict[str, Any] | None:
    line = file.readline(BYTES_PER_BATCH)
    while line and not line.strip():
        line = file.readline(BYTES_PER_BATCH)
    try:
        value = orjson.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
