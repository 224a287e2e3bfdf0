"""The job of `make bench-overhead`: its input, its spec, and its rows as ingest makes them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.jobs.bench.models import BenchModel
from specbatch.jobs.bench.plan import DEMO_PROMPTS
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.inputs.planner import plan
from specbatch.pipeline.inputs.rows import RowChecker
from specbatch.pipeline.inputs.sources import open_source
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.records import PromptRow
from specbatch.schemas.spec import JobSpec, load_spec


def write_input(path: Path, count: int) -> None:
    """The demo's prompts, again and again, each time under another first line."""
    rows = pq.read_table(DEMO_PROMPTS).to_pylist()
    made = []
    for i in range(count):
        row, again = rows[i % len(rows)], i // len(rows)
        head = f"# {again}\n" if again else ""
        made.append(row | {"id": f"{row['id']}#{again}", "prompt": head + row["prompt"]})
    schema = pa.schema([(name, pa.string()) for name in ("id", "prompt", "tag")])
    pq.write_table(pa.Table.from_pylist(made, schema=schema), path)


def spec_of(model: BenchModel, depth: str, source: Path, out: Path, new_tokens: int) -> JobSpec:
    """History off: the second turn would draft from the first one's outputs."""
    return load_spec(
        {
            "name": f"overhead-{depth}",
            "input": {"uri": str(source)},
            "output": {"uri": str(out)},
            "verifier": str(model.folder),
            "proposer": str(model.draft),
            "sampling": {"max_tokens": new_tokens, "ignore_eos": True},
            "speculation": {"depth": depth, "history_tokens": 0},
        }
    )


def rows_of(spec: JobSpec) -> list[PromptRow]:
    """The rows as ingest makes them."""
    folder = inspect_model(spec.verifier)
    tokenizer = TextTokenizer.load(str(folder.path))
    checker = RowChecker(spec, tokenizer, folder.context_tokens, folder.vocab_size, today=0.0)
    source = open_source(spec.input, Objects())
    return [row for group in plan(source, checker, spec.group_size) for row in group.rows]
