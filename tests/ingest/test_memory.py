"""Planning a large input takes little memory: measured in a process of its own."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.pipeline  # starts processes

ROWS = 200_000
PROGRAM = """
import resource, sys
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.outputs.outputs import OutputWriter
from specbatch.pipeline.inputs.planner import plan
from specbatch.pipeline.inputs.rows import RowChecker
from specbatch.pipeline.inputs.sources import open_source
from specbatch.schemas.spec import load_spec

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

tokenizer = TextTokenizer.load(sys.argv[2])
before = peak_mib()
spec = load_spec({"input": {"uri": sys.argv[1]}, "output": {"uri": "/o"}, "verifier": "m"})
source = open_source(spec.input, Objects())
checker = RowChecker(spec, tokenizer, 4096, tokenizer.vocab_size, today=0.0)
accepted = groups = 0
for group in plan(source, checker, spec.group_size):
    accepted, groups = accepted + len(group.rows), groups + bool(group.rows)
print(accepted, groups, round(peak_mib() - before))
"""


@pytest.mark.parametrize(
    "form",
    [
        "parquet",
        pytest.param("arrow", marks=pytest.mark.long),
        pytest.param("csv", marks=pytest.mark.long),
        "jsonl",
    ],
)
def test_planning_two_hundred_thousand_rows_takes_little_memory(
    tmp_path: Path, model_folder: Path, form: str
) -> None:
    path = tmp_path / f"in.{form}"
    rows = [f"Say something about {i}." for i in range(ROWS)]
    ids = [f"row-{i}" for i in range(ROWS)]
    if form == "parquet":  # one giant row group, the worst case
        table = pa.table({"id": ids, "prompt": rows})
        pq.write_table(table, path, row_group_size=ROWS, use_dictionary=False)
    elif form == "arrow":  # one giant record batch
        table = pa.table({"id": ids, "prompt": rows})
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    elif form == "csv":
        with path.open("w", newline="") as text:
            csv.writer(text).writerows([("id", "prompt"), *zip(ids, rows, strict=True)])
    else:
        with path.open("wb") as file:
            for row_id, row in zip(ids, rows, strict=True):
                file.write(orjson.dumps({"id": row_id, "prompt": row}) + b"\n")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), str(model_folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    accepted, groups, grown_mib = map(int, done.stdout.split())
    assert (accepted, groups) == (ROWS, ROWS // 64)
    assert grown_mib < 200
