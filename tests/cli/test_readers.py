"""Every reader of Parquet opens what a job leaves, and what `export` writes, with one call."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import duckdb
import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest

from specbatch.pipeline.outputs import outputs
from specbatch.schemas.arrow import OUTPUT

Reader = Callable[[str], tuple[int, list[str]]]  # a folder: rows, names of the columns


def with_pandas(folder: str) -> tuple[int, list[str]]:
    table = pd.read_parquet(folder)
    return len(table), list(table.columns)


def with_pyarrow(folder: str) -> tuple[int, list[str]]:
    table = pq.read_table(folder)
    return table.num_rows, table.column_names


def with_polars(folder: str) -> tuple[int, list[str]]:
    table = pl.read_parquet(folder)
    return table.height, table.columns


def with_duckdb(folder: str) -> tuple[int, list[str]]:
    table = duckdb.read_parquet(f"{folder}/*.parquet")
    return table.shape[0], table.columns


def with_datasets(folder: str) -> tuple[int, list[str]]:
    table = datasets.load_dataset(folder, split="train")
    return table.num_rows, table.column_names


READERS = [with_pandas, with_pyarrow, with_polars, with_duckdb, with_datasets]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` keeps a copy of what it has read."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs have several parts."""
    monkeypatch.setattr(outputs, "ROWS_PER_PART", 5)


def as_requests(folder: Path) -> None:
    """An OpenAI batch file of twelve requests, one of which is refused."""
    bodies: list[Any] = [[{"role": "user", "content": f"say {i}"}] for i in range(11)]
    lines = [
        {
            "custom_id": f"c{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": messages},
        }
        for i, messages in enumerate([*bodies, "none"])
    ]
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    ("flags", "state", "beside"),
    [
        ([], "done", set()),
        (["--input", "requests.jsonl"], "partial", {"output.jsonl", "errors.jsonl"}),
        (
            ["--deadline-sec", 0.001],
            "cancelled",
            {"remainder-{job}.parquet", "remainder-{job}.yaml"},
        ),
    ],
    ids=["parquet", "openai", "stopped"],
)
def test_every_reader_opens_what_a_job_leaves(
    cli: Any, job: Any, folder: Path, flags: list[Any], state: str, beside: set[str]
) -> None:
    as_requests(folder)
    left = cli("submit-job", *job, *flags, "--local", "--json").json
    assert left["state"] == state
    names = {path.name for path in Path(left["output"]).iterdir()}
    own = {"data", "manifest.json", "_specbatch_job.json"}
    assert names == own | {name.format(job=left["job"]) for name in beside}
    parts = [f"part-{number:05d}.parquet" for number in range(3)]
    assert sorted(path.name for path in Path(left["data"]).iterdir()) == parts
    for reader in READERS:
        assert reader(left["data"]) == (12, OUTPUT.names), reader.__name__


@pytest.mark.usefixtures("small_parts")
def test_readers_of_json_lines_open_what_a_job_leaves(cli: Any, job: Any) -> None:
    flags = ["--local", "--json", "--output-format", "jsonl"]
    folder = cli("submit-job", *job, *flags).json["data"]
    parts = [f"part-{number:05d}.jsonl" for number in range(3)]
    assert sorted(path.name for path in Path(folder).iterdir()) == parts
    opened = {
        "polars": pl.scan_ndjson(f"{folder}/*.jsonl").collect(),
        "duckdb": duckdb.read_json(f"{folder}/*.jsonl"),
        "datasets": datasets.load_dataset(folder, split="train"),
    }
    for name, table in opened.items():
        assert (table.shape[0], table.shape[1]) == (12, len(OUTPUT.names)), name


def test_every_reader_opens_each_set_of_a_folder_of_exports(cli: Any, job: Any) -> None:
    done = cli("submit-job", *job, "--local", "--json").json
    for what, rows in (("completions", 12), ("tokens", 12 * 6)):
        assert cli("export", done["job"], "--what", what, "--to", "sets").code == 0
        for reader in READERS:
            assert reader(f"sets/{what}")[0] == rows, (what, reader.__name__)
