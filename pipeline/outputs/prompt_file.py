"""Rows of a job as an input file of another: its prompts as token ids, with what decides their
outputs.

Columns: `id`, `prompt_ids`, `seed` (of sample 0), `tag`, `sampling` (JSON text of the row's own
values; null if it has none) and `row_index` (of the job that the rows are of; no input reads it).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.schemas.records import PromptRow

_ROWS = 1024  # in memory at a time

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("tag", pa.string()),
        pa.field("sampling", pa.string()),
        pa.field("row_index", pa.int64(), nullable=False),
    ]
)


def input_values(uri: str) -> dict[str, str]:
    """The `input` of a spec that reads such a file."""
    return {
        "uri": uri,
        "format": "parquet",
        "prompt_column": "prompt_ids",
        "prompt_kind": "token_ids",
        "id_column": "id",
        "seed_column": "seed",
        "tag_column": "tag",
        "sampling_column": "sampling",
    }


class PromptFile:
    """Rows into Parquet, a row group at a time. `samples`: of rows that do not say; `more`: columns
    beside its own, whose values `add` gets by name."""

    def __init__(self, path: Path, samples: int, more: tuple[pa.Field, ...] = ()) -> None:
        self._schema = pa.schema([*SCHEMA, *more])
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")
        self._samples = samples
        self._waiting: list[dict[str, Any]] = []
        self.rows = 0

    def add(self, row: PromptRow, **more: Any) -> None:
        self._waiting.append(
            {
                "id": row.row_id,
                "prompt_ids": row.prompt_ids,
                "seed": row.seed,
                "tag": row.tag,
                "sampling": _sampling_text(row, self._samples),
                "row_index": row.row_index,
                **more,
            }
        )
        self.rows += 1
        if len(self._waiting) >= _ROWS:
            self._write()

    def close(self) -> None:
        self._write()
        self._writer.close()

    def _write(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_pylist(self._waiting, schema=self._schema))
            self._waiting = []


def rows_in(path: Path, samples: int) -> Iterator[PromptRow]:
    """The rows of such a file, with nothing of their own sampling values but `n`."""
    with pq.ParquetFile(path) as parquet:
        for batch in parquet.iter_batches(_ROWS):
            for item in batch.to_pylist():
                own = orjson.loads(item["sampling"] or "{}")
                yield PromptRow(
                    item["row_index"],
                    item["id"],
                    tuple(item["prompt_ids"]),
                    item["seed"],
                    item["tag"],
                    own.get("n", samples),
                )


def _sampling_text(row: PromptRow, samples: int) -> str | None:
    """A row's own values as a sampling column says them."""
    values: dict[str, Any] = dict(row.overrides)
    if "logit_bias" in values:
        values["logit_bias"] = {str(token): bias for token, bias in values["logit_bias"]}
    if row.n != samples:
        values["n"] = row.n
    return orjson.dumps(values, option=orjson.OPT_SORT_KEYS).decode() if values else None
