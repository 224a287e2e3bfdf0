"""The remainder of a job that was stopped, as a job of its own: its prompts and their spec.

    remainder-<job>.parquet   every unfinished row, read or not, in the order of the input
    remainder-<job>.yaml      the job's spec for it; `submit-job` takes it as it is

Columns of the Parquet file: `id`, `prompt_ids` (token ids), `seed` (of sample 0), `tag`, `sampling`
(JSON text of the row's own values; null if it has none) and `row_index` (of the stopped job's
input; nothing reads it). The outputs of both jobs together are those of the undisturbed job.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from specbatch.pipeline.inputs.planner import PlannedGroup
from specbatch.pipeline.outputs.names import remainder_name
from specbatch.pipeline.storage.objects import join
from specbatch.schemas.errors import ObjectError, SpecbatchError
from specbatch.schemas.records import JobRow, PromptRow, RejectedRow
from specbatch.schemas.spec import JobSpec

_ROWS = 1024  # in memory at a time
_LIMITS = ("deadline_sec", "budget_usd")

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


@dataclass(frozen=True, slots=True)
class Remainder:
    """Files in a local folder. `problem`: why the input could not be read to its end."""

    prompts: Path
    spec: Path
    quarantined: Path  # rows that were met only now, as JSON lines
    rows: int
    unread: int  # of these, rows that were in no group
    problem: str | None = None

    @property
    def files(self) -> list[tuple[Path, int]]:
        """What is published, with the number of rows; nothing where nothing is left."""
        return [(self.prompts, self.rows), (self.spec, self.rows)] if self.rows else []

    def unread_rows(self, samples: int) -> Iterator[PromptRow]:
        """The rows that were in no group; `samples` of each that does not say."""
        return islice(_rows_of(self.prompts, samples), self.rows - self.unread, None)

    def newly_quarantined(self) -> Iterator[RejectedRow]:
        with self.quarantined.open() as lines:
            for line in lines:
                yield RejectedRow(**json.loads(line))


def write_remainder(
    folder: Path,
    job: JobRow,
    spec: JobSpec,
    unfinished: Iterable[PromptRow],
    unread: Iterable[PlannedGroup],
    tries_again: bool = False,
) -> Remainder:
    """Write it all, a few rows in memory at a time.

    `unfinished` rows were in groups, `unread` ones follow them in the input. Raises what reading
    the former raises. If the latter cannot be read, the `problem` says why; a caller that
    `tries_again` gets the `ObjectError` of storage that is out of reach for a while.
    """
    name = remainder_name(job.job_id)
    prompts, quarantined = folder / f"{name}.parquet", folder / "quarantined.jsonl"
    problem = None
    with ExitStack() as stack:
        lines = stack.enter_context(quarantined.open("w"))
        writer = _Writer(prompts, spec.sampling.n)
        stack.callback(writer.close)
        for row in unfinished:
            writer.add(row)
        read = writer.rows
        try:
            for group in unread:
                for rejected in group.rejected:
                    lines.write(json.dumps(asdict(rejected)) + "\n")
                for row in group.rows:
                    writer.add(row)
        except SpecbatchError as error:
            if tries_again and isinstance(error, ObjectError) and error.passing:
                raise
            problem = f"the rest of the input is not in the remainder: {error}"
    spec_file = folder / f"{name}.yaml"
    spec_file.write_text(_spec_text(job, spec, prompts.name), encoding="utf-8")
    return Remainder(prompts, spec_file, quarantined, writer.rows, writer.rows - read, problem)


class _Writer:
    """Rows into Parquet, a row group at a time."""

    def __init__(self, path: Path, samples: int) -> None:
        self._writer = pq.ParquetWriter(path, SCHEMA, compression="zstd")
        self._samples = samples
        self._waiting: list[dict[str, Any]] = []
        self.rows = 0

    def add(self, row: PromptRow) -> None:
        self._waiting.append(
            {
                "id": row.row_id,
                "prompt_ids": row.prompt_ids,
                "seed": row.seed,
                "tag": row.tag,
                "sampling": _sampling_text(row, self._samples),
                "row_index": row.row_index,
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
            self._writer.write_table(pa.Table.from_pylist(self._waiting, schema=SCHEMA))
            self._waiting = []


def _rows_of(path: Path, samples: int) -> Iterator[PromptRow]:
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


def _spec_text(job: JobRow, spec: JobSpec, prompts: str) -> str:
    """The spec file. Beside a local output it finds its prompts wherever the folder is moved."""
    output = spec.output.uri
    values = spec.model_dump(mode="json", exclude_defaults=True)
    values = {name: value for name, value in values.items() if name not in _LIMITS}
    values["input"] = {
        "uri": join(output, prompts) if "://" in output else prompts,
        "format": "parquet",
        "prompt_column": "prompt_ids",
        "prompt_kind": "token_ids",
        "id_column": "id",
        "seed_column": "seed",
        "tag_column": "tag",
        "sampling_column": "sampling",
    }
    values["output"] |= {"uri": f"{output.rstrip('/')}-remainder"}
    values["output"].pop("keep_columns", None)  # they are in the job's own input
    reason = " ".join((job.stop_reason or "it was cancelled").split())
    return (
        f"# What is left of job {job.job_id} ({reason}).\n"
        "# Submit it as it is; its deadline and its budget, if it had any, are left out.\n"
        + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    )
