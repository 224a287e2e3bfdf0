"""Writes and reads one part of a job's output: Parquet, or one JSON object per line.

Both formats have the columns of `arrow.OUTPUT`. JSON has no NaN: such a log-probability is null.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.schemas import arrow
from specbatch.schemas.records import CompletionRecord, FinishReason, RejectedRow
from specbatch.schemas.spec import OutputFormat

_ROWS_PER_ROW_GROUP = 4096

OutputRow = CompletionRecord | RejectedRow


def write_part(path: Path, rows: Iterator[OutputRow], kind: OutputFormat) -> int:
    """Write all rows, a row group in memory at a time; returns how many."""
    return (_write_jsonl if kind == "jsonl" else _write_parquet)(path, rows)


def read_part(data: bytes, name: str) -> pa.Table:
    """The rows of a part, whose name says the format."""
    if name.endswith(".parquet"):
        return pq.read_table(pa.BufferReader(data))
    rows = [orjson.loads(line) for line in data.splitlines()]
    return pa.Table.from_pylist(rows, schema=arrow.OUTPUT)


def _write_parquet(path: Path, rows: Iterator[OutputRow]) -> int:
    count = 0
    with pq.ParquetWriter(path, arrow.OUTPUT, compression="zstd") as writer:
        while batch := [columns_of(row) for row in islice(rows, _ROWS_PER_ROW_GROUP)]:
            writer.write_table(pa.Table.from_pylist(batch, schema=arrow.OUTPUT))
            count += len(batch)
    return count


def _write_jsonl(path: Path, rows: Iterator[OutputRow]) -> int:
    count, empty = 0, dict.fromkeys(arrow.OUTPUT.names)
    with path.open("wb") as file:
        for row in rows:
            file.write(orjson.dumps(empty | columns_of(row), option=orjson.OPT_APPEND_NEWLINE))
            count += 1
    return count


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
    return {
        "id": row.row_id,
        "row_index": row.row_index,
        "sample_index": row.sample_index,
        "text": None if row.finish_reason is FinishReason.ERROR else row.text,
        "token_ids": row.token_ids,
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
    }


def top_columns(row: CompletionRecord) -> list[list[dict[str, float]]] | None:
    """The most likely tokens at each place as a column has them; null if not asked for."""
    if row.top_logprobs is None:
        return None
    return [
        [{"token_id": t, "logprob": p} for t, p in zip(ids, values, strict=True)]
        for ids, values in row.top_logprobs
    ]
