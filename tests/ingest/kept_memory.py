"""Keeps all columns of a small and a large input of every type, checks them, prints peaks in MiB.

python kept_memory.py ROWS
"""

from __future__ import annotations

import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from ingest.making import completion
from ingest.test_kept import every_type

from specbatch.pipeline.inputs.kept import kept_schema
from specbatch.pipeline.inputs.sources import open_source
from specbatch.pipeline.outputs.outputs import OutputWriter
from specbatch.pipeline.outputs.parts import Kept
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.records import CompletionRecord
from specbatch.schemas.spec import InputSpec

AT_ONCE = 10_000


def blocks(rows: int) -> Iterator[pa.Table]:
    """The same cells again and again; ids and prompts need not differ here."""
    block = every_type(range(AT_ONCE))
    yield from (block for _ in range(rows // AT_ONCE))


def peak_mib(rows: int, folder: Path) -> float:
    """The process's peak after an input of so many rows was carried into an output."""
    given = folder / "in.parquet"
    schema = next(blocks(AT_ONCE)).schema
    with pq.ParquetWriter(given, schema) as writer:
        for block in blocks(rows):
            writer.write_table(block)
    source = open_source(InputSpec(uri=str(given), id_column="prompt"), Objects())
    wanted = tuple(name for name in schema.names if name != "id")
    kept = Kept(kept_schema(source, wanted), source.kept_rows(kept_schema(source, wanted)))
    completions: Iterator[CompletionRecord] = map(completion, range(rows))
    OutputWriter(Objects(), str(folder / "out"), "job", 100_000).write(completions, (), kept=kept)
    _check(folder / "out" / "data", rows, wanted)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _check(data: Path, rows: int, wanted: tuple[str, ...]) -> None:
    block, seen = every_type(range(AT_ONCE)).select(wanted), 0
    for part in sorted(data.iterdir()):
        for batch in pq.ParquetFile(part).iter_batches(AT_ONCE // 4):
            first = seen % AT_ONCE
            same = block.slice(first, batch.num_rows)
            found = pa.Table.from_batches([batch]).select(wanted)
            same = same.cast(found.schema)
            if same.num_rows == batch.num_rows and not found.equals(same):
                raise SystemExit(f"rows from {seen} on differ in {part.name}")
            seen += batch.num_rows
    assert seen == rows, f"{seen} rows instead of {rows}"


if __name__ == "__main__":
    most = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        small = peak_mib(most // 4, Path(one))
        print(round(small), round(peak_mib(most, Path(other))))
