"""A job keeps columns of its input: whole, stopped and retried, and where the input has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from specbatch.pipeline.stages import publish


def kept(folder: str) -> list[tuple[int, int, str]]:
    rows = pq.read_table(folder).to_pylist()
    return [(row["row_index"], row["number"], row["prompt"]) for row in rows]


def test_a_job_that_is_stopped_and_retried_keeps_columns(cli: Any, job: Any) -> None:
    wanted = [(i, i, f"def f{i}(x):") for i in range(12)]
    flags = ["--keep-columns", "all", "--deadline-sec", 0.001, "--local", "--json"]
    stopped = cli("submit-job", *job, *flags).json
    assert stopped["state"] == "cancelled"
    assert kept(stopped["data"]) == wanted
    rest = f"out/remainder-{stopped['job']}.yaml"
    assert "keep_columns" not in Path(rest).read_text()
    assert cli("retry", stopped["job"], "--local").code == 0
    assert kept(stopped["data"]) == wanted
    assert set(pq.read_table(stopped["data"])["finish_reason"].to_pylist()) == {"length"}


def test_an_input_that_changed_is_refused_and_a_retry_publishes(
    cli: Any, job: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, before = folder / "prompts.parquet", folder / "before.parquet"
    read_again = publish.kept_columns

    def change(*arguments: Any) -> Any:
        given.rename(before)
        pq.write_table(pq.read_table(before).slice(1), given)
        return read_again(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(publish, "kept_columns", change)
        failed = cli("submit-job", *job, "--keep-columns", "number", "--local", "--json")
    assert failed.code == 4
    assert "files of the input were added, removed or changed" in failed.complaint
    assert failed.json["data"] is None
    before.rename(given)
    assert cli("retry", failed.json["job"], "--local").code == 0
    assert pq.read_table("out/data")["number"].to_pylist() == list(range(12))
