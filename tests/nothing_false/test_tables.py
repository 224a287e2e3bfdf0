"""The commands themselves, from one Delta table into another: a job that is killed goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from support.local_runs import LocalRuns
from support.tables import rows_of

TABLES = ("--input", "lake/prompts", "--format", "delta", "--table", "lake/answers")


class TableRuns(LocalRuns):
    """Jobs whose prompts are in a Delta table."""

    def job(self, output: str, *more: object) -> list[str]:
        return super().job(output, *TABLES, *more)


@pytest.fixture
def place(tmp_path: Path) -> TableRuns:
    made = TableRuns(tmp_path)
    for half in (slice(0, 40), slice(40, None)):
        data = pq.read_table(tmp_path / "prompts.parquet")
        write_deltalake(
            tmp_path / "lake" / "prompts", data.take(list(range(len(data)))[half]), mode="append"
        )
    return made


def test_a_killed_command_goes_on_with_the_same_rows_and_commits_once(place: TableRuns) -> None:
    job_id, _ = place.ended_in_the_middle(signal.SIGKILL, "out")
    table, answers = place.home / "lake" / "prompts", place.home / "lake" / "answers"
    assert rows_of(answers) == []
    DeltaTable(table).update({"prompt": "'quite another'"})
    place.leases_run_out()
    done = place.run("specbatch", "retry", job_id, "--local")
    assert done.returncode == 0, done.stderr
    texts = place.output("out")
    assert {row["id"]: row["text"] for row in rows_of(answers)} == texts
    assert len(texts) == 96
    shown = place.run("specbatch", "show", job_id)
    assert f"input: Delta table {table}, version 1" in shown.stdout.replace("\n", "")
    assert f"table: Delta table {answers}, version 1" in shown.stdout.replace("\n", "")
