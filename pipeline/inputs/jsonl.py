"""Reads rows of JSONL files and of OpenAI batch files.

A line that is not JSON is a bad row, not a bad file; blank lines are not rows. Positions are byte
offsets, so a resume seeks straight to one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson

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
from specbatch.pipeline.inputs.openai_lines import read_line
from specbatch.pipeline.inputs.prompt_template import check_columns, columns_of
from specbatch.pipeline.inputs.text_files import BOM, check_unchanged, open_text, reading
from specbatch.pipeline.storage.object_store import ObjectInfo
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.errors import InputError
from specbatch.schemas.openai_formats import CHATS, COMPLETIONS, OPENAI_FORMATS
from specbatch.schemas.records import SourcePosition
from specbatch.schemas.spec import NO_TEMPLATE_OF_BODIES, InputSpec

if TYPE_CHECKING:
    import pyarrow as pa

MAX_LINE_BYTES = MAX_ROW_BYTES
_LINES_CHECKED = 100  # by the preflight, per file
_PASSED_BY_BYTES = 1 << 20
_KINDS: dict[Format, PromptKind] = {CHATS: "messages", COMPLETIONS: "auto"}


@dataclass(frozen=True, slots=True)
class _Giant:
    """A line with more bytes than the reader keeps."""

    size: int

    def __len__(self) -> int:
        return 0


class JsonlSource:
    """A list of JSONL files; the formats of OpenAI read `custom_id` and `body` of each line."""

    def __init__(self, spec: InputSpec, objects: Objects, files: list[ObjectInfo], name: Format):
        self.files = files
        self.format = name
        is_openai = name in OPENAI_FORMATS
        if is_openai and spec.sampling_column is not None:
            raise InputError("input.sampling_column is not for openai files: their bodies say it")
        if is_openai and spec.is_templated:
            raise InputError(f"{spec.uri} is an OpenAI batch file: {NO_TEMPLATE_OF_BODIES}")
        self._spec = spec
        self._objects = objects
        self._id = "custom_id" if is_openai else spec.id_column or "id"
        self._tag = spec.tag_column or "tag"
        self._prompt = "body" if is_openai else spec.read_prompt_column
        self._kind: PromptKind = _KINDS.get(name, spec.prompt_kind)
        self.has_ids = True  # any line may have one
        self._seen: dict[str, None] = {}  # fields of the first file's first lines

    @cached_property
    def _named(self) -> tuple[str, ...]:
        """The fields that the templates name."""
        return columns_of(self._spec)

    def check(self) -> None:
        for info in self.files:
            self._check_file(info)

    def columns(self) -> ReadColumns:
        there = tuple((name, None) for name in self._seen)
        row_id = self._id if self._id in self._seen else None
        prompt = dict.fromkeys(filter(None, (self._prompt, *self._named)))
        return ReadColumns(there, row_id, tuple(prompt))

    def read(self, start: SourcePosition | None = None) -> Iterator[RawBatch]:
        for info in files_from(self.files, start):
            begin = start.row_offset if start is not None and info.uri == start.uri else 0
            for offsets, lines in self._chunks(info, begin):
                rows = [self._row(line) for line in lines]
                yield RawBatch(info.uri, info.version, 0, offsets, self._kind, rows)

    def ids_until(self, position: SourcePosition) -> Iterator[list[Any]]:
        for info in self.files:
            here = info.uri == position.uri
            for offsets, lines in self._chunks(info, 0):
                keep = [
                    line
                    for offset, line in zip(offsets, lines, strict=False)
                    if not here or offset < position.row_offset
                ]
                rows = map(self._row, keep)
                yield [NO_ID if row.is_nameless else row.id for row in rows]
                if here and offsets[-1] >= position.row_offset:
                    return
            if here:
                return

    def kept_schema(self, wanted: Sequence[str] | None) -> pa.Schema:
        """A first pass over all rows. A field is a truth value, an integer, a number or text where
        all rows have it so; any other is JSON text, marked in the field's metadata."""
        import pyarrow as pa  # who only submits has none

        from specbatch.pipeline.inputs.kept import kept_names
        from specbatch.pipeline.inputs.kept_json import field_of, kind_of

        seen: dict[str, set[str]] = {name: set() for name in wanted or ()}
        for value in self._objects_of_lines():
            for name, content in value.items():
                if wanted is None or name in seen:
                    seen.setdefault(name, set()).add(kind_of(content))
        for name, kinds in seen.items():
            if not kinds:
                raise InputError(f"no row of {self._spec.uri} has a field `{name}`")
        names = kept_names(list(seen), wanted, self._id)
        return pa.schema([field_of(name, seen[name]) for name in names])

    def kept_rows(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        from specbatch.pipeline.inputs.kept_json import column_of

        for info in self.files:
            for _, lines in self._chunks(info, 0):
                parsed = map(_parse, lines)
                rows = [value if isinstance(value, dict) else {} for value in parsed]
                columns = [
                    column_of([row.get(field.name) for row in rows], field) for field in schema
                ]
                yield pa.RecordBatch.from_arrays(columns, schema=schema)

    def _objects_of_lines(self) -> Iterator[dict[str, Any]]:
        for info in self.files:
            for _, lines in self._chunks(info, 0):
                yield from (value for value in map(_parse, lines) if isinstance(value, dict))

    def pause(self) -> None:
        """Nothing to do: no other process reads these files."""

    def is_empty(self) -> bool:
        """Whether no file has a line that is not blank. Raises as `check` does."""
        return not any(map(self._has_line, self.files))

    def _has_line(self, info: ObjectInfo) -> bool:
        with reading(info), open_text(self._objects, info) as file:
            return next(_lines(file, 0), None) is not None

    def _check_file(self, info: ObjectInfo) -> None:
        seen: dict[str, None] = {}
        lines = good = size = 0
        with reading(info), open_text(self._objects, info) as file:
            for _, _, line in _lines(file, 0):
                lines, size = lines + 1, size + len(line)
                value = _parse(line)
                if isinstance(value, dict):
                    good += 1
                    seen.update(dict.fromkeys(value))
                if lines >= _LINES_CHECKED or size >= BYTES_PER_BATCH:
                    break
        if info is self.files[0]:
            self._seen = seen
        if lines and not good:
            raise InputError(f"{info.uri} is not JSONL: none of its first lines is a JSON object")
        spec = self._spec
        needed = {self._prompt, spec.id_column, spec.seed_column, spec.tag_column}
        needed.add(spec.sampling_column)
        if good:
            check_columns(spec, info.uri, seen, "field", " in its first lines")
        for name in sorted(filter(None, needed)):
            if good and name not in seen:
                raise InputError(
                    f"{info.uri} has no field `{name}` in its first lines; "
                    f"its fields are {', '.join(seen)}"
                )

    def _chunks(
        self, info: ObjectInfo, begin: int
    ) -> Iterator[tuple[list[int], list[bytes | _Giant]]]:
        """(offset of every line and of what follows, lines) in bounded pieces.

        Raises `InputError` if the file was written to meanwhile.
        """
        offsets: list[int] = []
        lines: list[bytes | _Giant] = []
        size, end = 0, begin
        with reading(info), open_text(self._objects, info) as file:
            for offset, end, line in _lines(file, begin):
                offsets.append(offset)
                lines.append(line)
                size += len(line)
                if len(lines) >= ROWS_PER_BATCH or size >= BYTES_PER_BATCH:
                    check_unchanged(file, info)
                    yield [*offsets, end], lines
                    offsets, lines, size = [], [], 0
            check_unchanged(file, info)
        if lines:
            yield [*offsets, end], lines

    def _row(self, line: bytes | _Giant) -> RawRow:
        value = _parse(line)
        if isinstance(value, tuple):
            return RawRow(problem=value)
        if self.format in OPENAI_FORMATS:
            return read_line(value, value.get(self._tag), self.format)
        return RawRow(
            value.get(self._id),
            value.get(self._prompt) if self._prompt else None,
            value.get(self._spec.seed_column) if self._spec.seed_column else None,
            value.get(self._tag),
            sampling=value.get(self._spec.sampling_column) if self._spec.sampling_column else None,
            columns={name: value.get(name) for name in self._named} if self._named else None,
        )


def _lines(file: BinaryIO, begin: int) -> Iterator[tuple[int, int, bytes | _Giant]]:
    """(offset, end, line) of every line that is not blank. Lines that are too long are skipped in
    pieces; only their length is kept."""
    file.seek(begin)
    offset = begin
    while line := file.readline(MAX_LINE_BYTES + 1):
        start = offset
        offset += len(line)
        if len(line) > MAX_LINE_BYTES:
            ended = line.endswith(b"\n")
            del line
            while not ended and (rest := file.readline(_PASSED_BY_BYTES)):
                offset += len(rest)
                ended = rest.endswith(b"\n")
            yield start, offset, _Giant(offset - start - ended)
            continue
        if start == 0:
            line = line.removeprefix(BOM)
        if line.strip():
            yield start, offset, line


def _parse(line: bytes | _Giant) -> dict[str, Any] | tuple[str, str]:
    """The line's object, or the (code, reason) that rejects the row."""
    if isinstance(line, _Giant):
        return "too_long", f"the line has {line.size} bytes; at most {MAX_LINE_BYTES} are read"
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        try:
            line.decode()
        except UnicodeDecodeError:
            return "invalid_utf8", "the line is not valid UTF-8"
        return "bad_json", f"the line is not JSON: {str(error).partition(':')[0]}"
    return value if isinstance(value, dict) else ("bad_json", "the line is not a JSON object")
