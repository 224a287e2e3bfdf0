"""Rows of Parquet files, one row group at a time and only the columns that are needed.

`ParquetFile.iter_batches` with a read buffer keeps memory bounded whatever the size of the file or
of a row group; a dataset scan would not. The work id of a row is (file version, row group, row).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.pipeline.ingest.objects import ObjectInfo, Objects
from specbatch.pipeline.ingest.sources import (
    BYTES_PER_BATCH,
    ROWS_PER_BATCH,
    Format,
    PromptKind,
    RawBatch,
    RawRow,
    as_input_error,
    files_from,
)
from specbatch.schemas.errors import InputError, ObjectError
from specbatch.schemas.records import SourcePosition
from specbatch.schemas.spec import InputSpec

_READ_BUFFER_BYTES = 4 << 20  # per column; one request to S3
_ACCEPTED = {
    "text": "text (string, binary, or a dictionary of strings)",
    "token_ids": "token ids (a list of integers)",
    "messages": "chat messages (a list of {role, content}, or JSON text with prompt_kind messages)",
}


class ParquetSource:
    """A list of Parquet files with the same columns."""

    format: Format = "parquet"

    def __init__(self, spec: InputSpec, objects: Objects, files: list[ObjectInfo]):
        self.files = files
        self._spec = spec
        self._objects = objects
        with self._open(files[0]) as first:
            names = first.schema_arrow.names
        self._id = spec.id_column or ("id" if "id" in names else None)
        self._tag = spec.tag_column or ("tag" if "tag" in names else None)
        self.has_ids = self._id is not None

    def check(self) -> None:
        for info in self.files:
            with self._open(info) as parquet:
                self._check_columns(info, parquet.schema_arrow)

    def count_rows(self) -> int:
        """Rows by the files' footers; reads no data."""
        total = 0
        for info in self.files:
            with self._open(info) as parquet:
                total += parquet.metadata.num_rows
        return total

    def read(self, start: SourcePosition | None = None) -> Iterator[RawBatch]:
        for info in files_from(self.files, start):
            begin = start if start is not None and info.uri == start.uri else None
            with self._open(info) as parquet:
                kind = self._check_columns(info, parquet.schema_arrow)
                for group in range(begin.row_group if begin else 0, parquet.num_row_groups):
                    skip = begin.row_offset if begin and group == begin.row_group else 0
                    for offset, batch in self._batches(info, parquet, group, self._columns(), skip):
                        yield self._raw(info, group, offset, batch, kind)

    def ids_until(self, position: SourcePosition) -> Iterator[list[Any]]:
        for info in self.files:
            with self._open(info) as parquet:
                for group in range(parquet.num_row_groups):
                    here = info.uri == position.uri
                    if here and group > position.row_group:
                        return
                    limit = position.row_offset if here and group == position.row_group else None
                    yield from self._ids(info, parquet, group, limit)
            if info.uri == position.uri:
                return

    def _ids(
        self, info: ObjectInfo, parquet: pq.ParquetFile, group: int, limit: int | None
    ) -> Iterator[list[Any]]:
        if self._id is None:
            return
        for offset, batch in self._batches(info, parquet, group, [self._id], 0):
            keep = batch.num_rows if limit is None else max(0, limit - offset)
            yield plain(batch.column(0).slice(0, keep))
            if limit is not None and offset + batch.num_rows >= limit:
                return

    def _batches(
        self, info: ObjectInfo, parquet: pq.ParquetFile, group: int, columns: list[str], skip: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(row in the group, rows) of one row group, after its first `skip` rows."""
        offset = 0
        with _damage_named(f"row group {group} of {info.uri}"):
            for batch in parquet.iter_batches(
                batch_size=_batch_rows(parquet.metadata.row_group(group), columns),
                row_groups=[group],
                columns=columns,
                use_threads=False,  # the next stage has the processor busy; fewer buffers in flight
            ):
                drop = min(max(0, skip - offset), batch.num_rows)
                offset += batch.num_rows
                if drop < batch.num_rows:
                    yield offset - batch.num_rows + drop, batch.slice(drop)
        if offset != parquet.metadata.row_group(group).num_rows:
            raise InputError(f"row group {group} of {info.uri} is cut short; write the file again")

    def _raw(
        self, info: ObjectInfo, group: int, offset: int, batch: pa.RecordBatch, kind: PromptKind
    ) -> RawBatch:
        def column(name: str | None) -> list[Any]:
            return [None] * batch.num_rows if name is None else plain(batch.column(name))

        rows = [
            RawRow(row_id, prompt, seed, tag, sampling=sampling)
            for row_id, prompt, seed, tag, sampling in zip(
                column(self._id), column(self._spec.prompt_column), column(self._spec.seed_column),
                column(self._tag), column(self._spec.sampling_column), strict=True,
            )
        ]  # fmt: skip
        offsets = range(offset, offset + batch.num_rows + 1)
        return RawBatch(info.uri, info.version, group, offsets, kind, rows)

    def _columns(self) -> list[str]:
        spec = self._spec
        named = [spec.prompt_column, self._id, spec.seed_column, self._tag, spec.sampling_column]
        return list(dict.fromkeys(name for name in named if name is not None))

    def _check_columns(self, info: ObjectInfo, schema: pa.Schema) -> PromptKind:
        for name in self._columns():
            if name not in schema.names:
                raise InputError(
                    f"{info.uri} has no column `{name}`; its columns are {', '.join(schema.names)}"
                )
            if schema.names.count(name) > 1:
                raise InputError(f"{info.uri} has several columns `{name}`; rename all but one")
        seed = self._spec.seed_column
        if seed and not pa.types.is_integer(schema.field(seed).type):
            raise InputError(
                f"column `{seed}` of {info.uri} is {schema.field(seed).type}; "
                "seeds must be integers"
            )
        sampling = self._spec.sampling_column
        if sampling and not _is_sampling(schema.field(sampling).type):
            raise InputError(
                f"column `{sampling}` of {info.uri} is {schema.field(sampling).type}; "
                "sampling values must be a struct or JSON text"
            )
        for name in filter(None, (self._id, self._tag)):
            if pa.types.is_nested(schema.field(name).type):
                raise InputError(
                    f"column `{name}` of {info.uri} is {schema.field(name).type}; "
                    "ids and tags must be strings or numbers"
                )
        prompt = schema.field(self._spec.prompt_column)
        kind = prompt_kind(prompt.type, self._spec.prompt_kind)
        if kind is None:
            wanted = self._spec.prompt_kind
            accepted = "; or ".join(_ACCEPTED.values()) if wanted == "auto" else _ACCEPTED[wanted]
            raise InputError(
                f"column `{prompt.name}` of {info.uri} is {prompt.type}; accepted: {accepted}"
            )
        return kind

    @contextmanager
    def _open(self, info: ObjectInfo) -> Iterator[pq.ParquetFile]:
        try:
            file = self._objects.open(info.uri, info.version)
        except ObjectError as error:
            raise as_input_error(error) from error
        with file:
            try:
                parquet = pq.ParquetFile(
                    file, buffer_size=_READ_BUFFER_BYTES, page_checksum_verification=True
                )
            except ObjectError as error:
                raise as_input_error(error) from error
            except (pa.ArrowException, OSError) as error:
                raise InputError(
                    f"{info.uri} is truncated or not Parquet; write it again, or leave it out"
                ) from error
            with parquet:
                yield parquet


def prompt_kind(kind: pa.DataType, wanted: PromptKind) -> PromptKind | None:
    """What a column of this type holds, or None when it cannot be what is wanted."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if _is_text(kind):
        return None if wanted == "token_ids" else "messages" if wanted == "messages" else "text"
    if not _is_list(kind):
        return None
    item = kind.value_type
    if pa.types.is_integer(item):
        return "token_ids" if wanted in ("auto", "token_ids") else None
    if pa.types.is_struct(item) and {"role", "content"} <= {f.name for f in item}:
        return "messages" if wanted in ("auto", "messages") else None
    return None


def plain(column: pa.Array) -> list[Any]:
    """Python values; text that is not valid UTF-8 stays `bytes`, and so marks its row."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if _is_text(column.type) and not pa.types.is_string(column.type):
        column = column.cast(pa.large_binary())
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        if not pa.types.is_string(column.type):
            return [_nested(item) for item in column]
        values = column.cast(pa.binary()).to_pylist()
    return [_text(value) if isinstance(value, bytes) else value for value in values]


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _nested(item: pa.Scalar) -> Any:
    try:
        return item.as_py()
    except UnicodeDecodeError:
        return b""


def _is_text(kind: pa.DataType) -> bool:
    is_of = pa.types
    return bool(
        is_of.is_string(kind) or is_of.is_large_string(kind) or is_of.is_string_view(kind)
        or is_of.is_binary(kind) or is_of.is_large_binary(kind) or is_of.is_binary_view(kind)
    )  # fmt: skip


def _is_sampling(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return _is_text(kind) or bool(pa.types.is_struct(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _batch_rows(group: pq.RowGroupMetaData, columns: list[str]) -> int:
    """Rows per batch, fewer where rows are large."""
    size: int = sum(
        chunk.total_uncompressed_size
        for chunk in map(group.column, range(group.num_columns))
        if chunk.path_in_schema.startswith(tuple(columns))
    )
    rows: int = group.num_rows
    return max(1, min(ROWS_PER_BATCH, BYTES_PER_BATCH * rows // max(1, size)))


@contextmanager
def _damage_named(what: str) -> Iterator[None]:
    """Name the place when Arrow or the store cannot read on; errors of our own pass through."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{what} is damaged; write the file again, or leave it out") from error
    except ObjectError as error:
        raise as_input_error(error) from error
