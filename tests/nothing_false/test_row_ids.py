"""A row without an id is named by its number, and no other row pays for it."""

from __future__ import annotations

import json
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support import forks
from support.models import TinyPair


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_later_row_may_really_have_that_number(
    tmp_path: Path, tiny_pair: TinyPair, form: str
) -> None:
    ids = [None, "x", None, "0", "2", "x"]
    path = tmp_path / f"in.{form}"
    if form == "parquet":
        pq.write_table(pa.table({"id": ids, "prompt": [f"p{i}" for i in range(6)]}), path)
    else:
        lines = [{"id": row_id, "prompt": f"p{i}"} for i, row_id in enumerate(ids)]
        path.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    done = forks.run(
        "specbatch", "submit-job", "--local", "--json", "--input", str(path), "--output", "out",
        "--max-tokens", "4", "--verifier", str(tiny_pair.verifier),
        environment={"SPECBATCH_WORKSPACE": str(tmp_path / "data")}, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert json.loads(done.stdout.strip().splitlines()[-1])["rows_failed"] == 1, done.stderr
    rows = pq.read_table(tmp_path / "out" / "data/part-00000.parquet").to_pylist()
    named = sorted((r["row_index"], r["id"], r["error"] is None) for r in rows)
    assert named == [
        (0, "0", True), (1, "x", True), (2, "2", True), (3, "0", True), (4, "2", True),
        (5, "x", False),
    ]  # fmt: skip
