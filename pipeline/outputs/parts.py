"""Writes and reads one part of a job's output: Parquet, or one JSON object per line.

Both formats have the columns of `arrow.output_schema`. JSON has no NaN: such a log-probability is
null.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.pipeline.outputs.tool_calls import calls_left_in
from specbatch.pipeline.outputs.values import values_of
from specbatch.schemas import arrow
from specbatch.schemas.errors import InputError
from specbatch.schemas.privacy import NOT_KEPT
from specbatch.schemas.records import CompletionRecord, FinishReason, RejectedRow
from specbatch.schemas.spec import OutputFormat

_ROWS_PER_ROW_GROUP = 4096
_BYTES_AT_ONCE = 32 << 20  # of kept columns

OutputRow = CompletionRecord | RejectedRow


@dataclass(eq=False, slots=True)
class _Loaded:
    """Kept columns of consecutive input rows, the first of which is row `first`."""

    first: int
    batch: pa.RecordBatch

    @property
    def rows_at_once(self) -> int:
        """Rows of output, so that many samples of large rows stay small."""
        rows: int = _BYTES_AT_ONCE * self.batch.num_rows // max(1, self.batch.nbytes)
        return max(1, min(_ROWS_PER_ROW_GROUP, rows))

    def of(self, rows: Sequence[OutputRow]) -> pa.RecordBatch:
        return self.batch.take(pa.array([row.row_index - self.first for row in rows], pa.int64()))


class Kept:
    """Columns of the input that go into the output, read as the output's rows need them."""

    def __init__(self, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
        """`batches`: the columns of all input rows, in order."""
        self.schema = schema
        self._batches = batches
        self._loaded = _Loaded(0, pa.RecordBatch.from_pylist([], schema=schema))

    def loaded_for(self, row: OutputRow) -> _Loaded:
        """The batch with this row. Rows must come in input order. Raises `InputError`."""
        while row.row_index >= self._loaded.first + self._loaded.batch.num_rows:
            batch = next(self._batches, None)
            if batch is None:
                raise InputError(
                    f"the input ends before row {row.row_index}, whose columns are to be kept; "
                    "make it as it was and use `specbatch retry`"
                )
            self._loaded = _Loaded(self._loaded.first + self._loaded.batch.num_rows, batch)
        return self._loaded


_Piece = tuple[list[OutputRow], pa.RecordBatch | None]


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of an output, and what a row has in them; what does not apply may be missing."""

    schema: pa.Schema
    of: Callable[[OutputRow], Mapping[str, Any]]

    def whole(self, row: OutputRow) -> dict[str, Any]:
        """A row with all of the columns, in their order."""
        found = self.of(row)
        return {name: found.get(name) for name in self.schema.names}


def columns_of_job(scored: bool = False) -> Columns:
    """Those of a job's output."""
    return Columns(arrow.output_schema(scored), columns_of)


def write_part(
    path: Path,
    rows: Iterator[OutputRow],
    kind: OutputFormat,
    kept: Kept | None,
    own: Columns,
) -> int:
    """Write all rows with their kept columns, a row group in memory at a time; returns how many.

    `own`: the output's columns. Raises what reading the kept columns raises.
    """
    write = _write_jsonl if kind == "jsonl" else _write_parquet
    more = kept.schema if kept is not None else None
    return write(path, _pieces(rows, kept), own, more)


def _pieces(rows: Iterator[OutputRow], kept: Kept | None) -> Iterator[_Piece]:
    if kept is None:
        while some := list(islice(rows, _ROWS_PER_ROW_GROUP)):
            yield some, None
        return
    for loaded, group in groupby(rows, key=kept.loaded_for):
        while some := list(islice(group, loaded.rows_at_once)):
            yield some, loaded.of(some)


def read_part(data: bytes, name: str) -> pa.Table:
    """The rows of a part, whose name says the format. Kept columns of JSON lines have the types
    that JSON says."""
    if name.endswith(".parquet"):
        return pq.read_table(pa.BufferReader(data))
    rows = [orjson.loads(line) for line in data.splitlines()]
    table = pa.Table.from_pylist(rows, schema=arrow.OUTPUT)
    for name in (name for name in (rows[0] if rows else ()) if name not in arrow.OUTPUT.names):
        table = table.append_column(name, pa.array([row[name] for row in rows]))
    return table


def _write_parquet(
    path: Path, pieces: Iterator[_Piece], own: Columns, more: pa.Schema | None
) -> int:
    count, schema = 0, pa.schema([*own.schema, *(more or ())], metadata=own.schema.metadata)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for table in _row_groups(_table(rows, own, kept, schema) for rows, kept in pieces):
            writer.write_table(table)
            count += table.num_rows
    return count


def _table(
    rows: list[OutputRow], own: Columns, kept: pa.RecordBatch | None, schema: pa.Schema
) -> pa.Table:
    table = pa.Table.from_pylist([own.of(row) for row in rows], schema=own.schema)
    columns = kept.columns if kept is not None else []
    return pa.Table.from_arrays([*table.columns, *columns], schema=schema)


def _row_groups(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in tables that are worth a row group each."""
    waiting: list[pa.Table] = []
    for table in tables:
        waiting.append(table)
        rows, size = sum(t.num_rows for t in waiting), sum(t.nbytes for t in waiting)
        if rows >= _ROWS_PER_ROW_GROUP or size >= _BYTES_AT_ONCE:
            yield pa.concat_tables(waiting)
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting)


def _write_jsonl(path: Path, pieces: Iterator[_Piece], own: Columns, more: pa.Schema | None) -> int:
    count = 0
    json_text = [field.name for field in more or () if field.metadata]
    with path.open("wb") as file:
        for rows, kept in pieces:
            columns = _plain(kept, json_text) if kept is not None else [{}] * len(rows)
            for row, others in zip(rows, columns, strict=True):
                line = own.whole(row) | others
                file.write(orjson.dumps(line, default=as_text, option=orjson.OPT_APPEND_NEWLINE))
            count += len(rows)
    return count


def _plain(kept: pa.RecordBatch, json_text: Sequence[str]) -> list[dict[str, Any]]:
    """Rows as JSON can have them. Columns of JSON text are values again."""
    columns = {name: values_of(kept.column(name)) for name in kept.schema.names}
    for name in json_text:
        columns[name] = [None if v is None else orjson.Fragment(v) for v in columns[name]]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def as_text(value: Any) -> str:
    """What JSON has no type for: bytes as base64, decimals and durations as text."""
    return b64encode(value).decode() if isinstance(value, bytes) else str(value)


def columns_of(row: OutputRow) -> dict[str, Any]:
    """A row of the output by column; what does not apply may be missing."""
    if isinstance(row, RejectedRow):
        return {
            "id": row.row_id,
            "row_index": row.row_index,
            "sample_index": 0,
            "finish_reason": FinishReason.ERROR.value,
            "error": f"{row.code}: {row.reason}",
        }
    has_text = row.finish_reason is not FinishReason.ERROR and not row.is_withheld
    is_whole = NOT_KEPT not in row.token_ids
    return {
        "id": row.row_id,
        "row_index": row.row_index,
        "sample_index": row.sample_index,
        "text": row.text if has_text else None,
        "token_ids": row.token_ids if is_whole else None,
        "finish_reason": row.finish_reason.value,
        "prompt_tokens": row.prompt_tokens,
        "completion_tokens": len(row.token_ids),
        "seed": row.seed,
        "acceptance_rate": row.accepted / row.proposed if row.proposed else None,
        "cost_usd": row.cost_usd,
        "verifier": row.verifier,
        "proposer": row.proposer,
        "error": row.error,
        "logprobs": None if row.top_logprobs is None else row.logprobs,
        "top_logprobs": top_columns(row),
        "numeric_class": row.numeric_class,
        "tool_calls": _call_columns(row),
        "score": row.score,
    }


def _call_columns(row: CompletionRecord) -> list[dict[str, str]] | None:
    """The calls of functions that an output ended with; None where there are none."""
    if row.finish_reason is not FinishReason.TOOL_CALLS:
        return None
    found = calls_left_in(row.text)
    if found is None:
        return None
    return [{"name": call.name, "arguments": call.arguments} for call in found.calls]


def top_columns(row: CompletionRecord) -> list[list[dict[str, float]]] | None:
    """The most likely tokens at each place as a column has them; null if not asked for."""
    if row.top_logprobs is None:
        return None
    return [
        [{"token_id": t, "logprob": p} for t, p in zip(ids, values, strict=True)]
        for ids, values in row.top_logprobs
    ]
