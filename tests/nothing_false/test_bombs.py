"""Small files that are large once they are read: memory stays bounded, only their rows are lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support import forks
from support.models import TinyPair
from support.peak_memory import PeakMemory

WAIT_SEC = 240.0
MOST_MIB = 1500  # of the whole process tree, above what a warm process has
BIG = 1_000_000_000


def one_cell(folder: Path) -> Path:
    """Three good rows, then one of a gigabyte in a row group of its own, then three more."""
    path = folder / "in.parquet"
    schema = pa.schema({"id": pa.string(), "prompt": pa.large_string()})
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for ids, prompts in (
            (["a", "b", "c"], ["x", "y", "z"]),
            (["big"], ["x" * BIG]),
            (["d", "e", "f"], ["u", "v", "w"]),
        ):
            writer.write_table(pa.table({"id": ids, "prompt": prompts}, schema=schema))
    assert path.stat().st_size < 100_000
    return path


def dictionary(folder: Path) -> Path:
    """100,000 rows that all are the same ten megabytes."""
    path = folder / "in.parquet"
    values = pa.array(["x" * 10_000_000], type=pa.string())
    places = pa.array([0] * 100_000, type=pa.int32())
    table = pa.table({"prompt": pa.DictionaryArray.from_arrays(places, values)})
    pq.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 300_000
    return path


def many(folder: Path) -> Path:
    """4,000 rows that all are the same 250 kB."""
    path = folder / "in.parquet"
    values = pa.array(["word " * 50_000], type=pa.string())
    places = pa.array([0] * 4_000, type=pa.int32())
    table = pa.table({"prompt": pa.DictionaryArray.from_arrays(places, values)})
    pq.write_table(table, path, compression="zstd")
    return path


def many_chats(folder: Path) -> Path:
    """The same as chats: text inside of lists."""
    path = folder / "in.parquet"
    chat = [{"role": "user", "content": "word " * 50_000}]
    pq.write_table(pa.table({"prompt": [chat] * 1_000}), path, compression="zstd")
    return path


def line(folder: Path) -> Path:
    """A line of 100 MB between two good ones."""
    path = folder / "in.jsonl"
    with path.open("wb") as file:
        file.write(b'{"id": "a", "prompt": "x"}\n{"id": "big", "prompt": "')
        for _ in range(100):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n{"id": "b", "prompt": "y"}\n')
    return path


BOMBS: dict[str, tuple[Callable[[Path], Path], int, int, str]] = {
    "one cell": (one_cell, 6, 1, ""),
    "dictionary": (dictionary, 0, 100_000, "too_long"),
    "many": (many, 0, 4_000, "too_long"),
    "many chats": (many_chats, 0, 1_000, "too_long"),
    "line": (line, 2, 1, "too_long"),
}


def measured(folder: Path, *arguments: object) -> tuple[int, str, str, float]:
    """Return code, stdout, stderr, and the memory taken in MiB."""
    with forks.open_memory() as out, forks.open_memory() as err:
        process = forks.fork(
            *map(str, arguments),
            environment={"SPECBATCH_WORKSPACE": str(folder / "data")},
            cwd=folder,
            stdout=out,
            stderr=err,
        )
        memory = PeakMemory(process.pid)
        try:
            code = process.wait(WAIT_SEC)
        finally:
            process.kill()
            peak = memory.end()
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    return code, texts[0], texts[1], peak - memory.first_mib


@pytest.mark.parametrize("name", BOMBS)
def test_its_rows_are_quarantined_and_the_others_done(
    tmp_path: Path, tiny_pair: TinyPair, name: str
) -> None:
    make, good, bad, code = BOMBS[name]
    returned, out, err, peak_mib = measured(
        tmp_path,
        *("submit-job", "--local", "--dry-run", "--json", "--input", make(tmp_path)),
        *("--output", "out", "--max-tokens", 4, "--verifier", tiny_pair.verifier),
    )
    assert returned == 0, err
    assert "Traceback" not in err
    plan: Any = json.loads(out.strip().splitlines()[-1])
    assert (plan["prompts"], plan["rows_failed"]) == (good, bad)
    assert not code or set(plan["quarantined"]) == {code}
    assert peak_mib < MOST_MIB


def test_a_job_goes_on_past_it(tmp_path: Path, tiny_pair: TinyPair) -> None:
    returned, out, err, peak_mib = measured(
        tmp_path,
        *("submit-job", "--local", "--json", "--input", one_cell(tmp_path)),
        *("--output", "out", "--max-tokens", 4, "--verifier", tiny_pair.verifier),
    )
    done: Any = json.loads(out.strip().splitlines()[-1])
    assert done["rows_failed"] == 1, err
    assert "Traceback" not in err
    rows = pq.read_table(tmp_path / "out" / "data/part-00000.parquet").to_pylist()
    assert [row["id"] for row in rows] == ["a", "b", "c", "big", "d", "e", "f"]
    assert [row["id"] for row in rows if row["error"]] == ["big"]
    assert peak_mib < MOST_MIB
    assert returned in (0, 3)
