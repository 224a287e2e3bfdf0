"""Rows of a published output, one at a time and in its order: memory does not grow with the job.

Two forms: `read_rows` yields all columns as plain values, for people; `compared_rows` yields what
decides whether two outputs are equal, with lists of numbers as bytes, which are quick to compare.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.pipeline.outputs.outputs import Manifest
from specbatch.pipeline.outputs.values import values_of
from specbatch.pipeline.storage.objects import Objects, join
from specbatch.schemas.errors import ObjectError
from specbatch.schemas.exports import WrittenFile

BATCH_ROWS = 1024

_COMPARED = (
    *("id", "row_index", "sample_index", "text", "token_ids", "finish_reason", "error"),
    "logprobs",
)
_INT32, _FLOAT32 = "i", "f"  # type codes of `array`

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """What one (row, sample) of a job came to."""

    row_id: str | None
    row_index: int
    sample_index: int
    text: str | None
    token_ids: bytes | None  # int32
    finish_reason: str
    error: str | None
    logprobs: bytes | None  # float32


def column_names(objects: Objects, uri: str, manifest: Manifest) -> list[str]:
    """The columns of an output. Raises `ObjectError`."""
    part = manifest.parts[0]
    with _opened(objects, uri, part) as file:
        if _is_parquet(part):
            return list(_parquet(file, part).schema_arrow.names)
        return list(orjson.loads(file.readline() or b"{}"))


def read_rows(
    objects: Objects, uri: str, manifest: Manifest, columns: Sequence[str] | None = None
) -> Iterator[Row]:
    """All rows, with these columns or all. Raises `ObjectError` for a part that is not as it was
    published."""
    for part in manifest.parts:
        with _opened(objects, uri, part) as file:
            if not _is_parquet(part):
                yield from (chosen(row, columns) for row in _lines(file, part))
                continue
            for batch in _batches(file, part, columns):
                yield from _of_columns(batch)


def _of_columns(batch: pa.RecordBatch) -> Iterator[Row]:
    names, columns = batch.schema.names, map(values_of, batch.columns)
    return (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))


def compared_rows(objects: Objects, uri: str, manifest: Manifest) -> Iterator[ComparedRow]:
    """The same rows, as far as they are compared."""
    for part in manifest.parts:
        with _opened(objects, uri, part) as file:
            if not _is_parquet(part):
                yield from (compared(row) for row in _lines(file, part))
                continue
            for batch in _batches(file, part, _COMPARED):
                yield from _of_batch(batch)


def compared(row: Row) -> ComparedRow:
    """A row of plain values; a log-probability that JSON could not write is NaN again."""
    asked_for = row.get("logprobs")
    if asked_for is not None:
        asked_for = [float("nan") if value is None else value for value in asked_for]
    return ComparedRow(
        row["id"],
        row["row_index"],
        row["sample_index"],
        row["text"],
        _packed(_INT32, row.get("token_ids")),
        row["finish_reason"],
        row.get("error"),
        _packed(_FLOAT32, asked_for),
    )


def token_ids(row: ComparedRow) -> Sequence[int]:
    """The token ids of a compared row."""
    return array(_INT32, row.token_ids or b"")


def logprobs(row: ComparedRow) -> Sequence[float]:
    """The log-probabilities of a compared row."""
    return array(_FLOAT32, row.logprobs or b"")


def _of_batch(batch: pa.RecordBatch) -> Iterator[ComparedRow]:
    columns = {
        name: [None] * batch.num_rows
        if name not in batch.schema.names
        else _slices(batch.column(name))
        if pa.types.is_list(batch.schema.field(name).type)
        else batch.column(name).to_pylist()
        for name in _COMPARED
    }
    for values in zip(*columns.values(), strict=True):
        yield ComparedRow(*values)


def _slices(column: pa.ListArray) -> list[bytes | None]:
    """The bytes of each list's numbers."""
    offsets = column.offsets.to_pylist()
    values = column.values.to_numpy(zero_copy_only=False)
    there = column.is_valid().to_pylist()
    return [
        values[begin:end].tobytes() if is_there else None
        for begin, end, is_there in zip(offsets, offsets[1:], there, strict=False)
    ]


def _packed(code: str, values: Sequence[Any] | None) -> bytes | None:
    return None if values is None else array(code, values).tobytes()


def _is_parquet(part: WrittenFile) -> bool:
    return part.name.endswith(".parquet")


def _opened(objects: Objects, uri: str, part: WrittenFile) -> BinaryIO:
    """Open a part. Raises `ObjectError` for one of another size than was published."""
    where = join(uri, part.name)
    found = objects.head(where)
    if found is None or found.size != part.size_bytes:
        there = "missing" if found is None else f"{found.size:,} bytes long"
        raise ObjectError(
            f"{where} is {there}, and was published with {part.size_bytes:,} bytes: restore it "
            "from a copy"
        )
    return objects.open(where, found.version)


def _parquet(file: BinaryIO, part: WrittenFile) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file)
    except pa.ArrowException as error:
        raise _damaged(part) from error


def _batches(
    file: BinaryIO, part: WrittenFile, columns: Sequence[str] | None
) -> Iterator[pa.RecordBatch]:
    parquet = _parquet(file, part)
    there = parquet.schema_arrow.names
    wanted = None if columns is None else [name for name in columns if name in there]
    try:
        yield from parquet.iter_batches(BATCH_ROWS, columns=wanted)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(part) from error


def _lines(file: BinaryIO, part: WrittenFile) -> Iterator[Row]:
    for line in file:
        try:
            yield orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise _damaged(part) from error


def chosen(row: Row, columns: Sequence[str] | None) -> Row:
    """The row with these columns alone, as far as it has them; with all if none are named."""
    return row if columns is None else {name: row[name] for name in columns if name in row}


def _damaged(part: WrittenFile) -> ObjectError:
    return ObjectError(f"{part.name} of the output is damaged: restore it from a copy")
