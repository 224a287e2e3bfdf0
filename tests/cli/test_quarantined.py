"""`show` tells which rows failed by themselves, `retry --quarantined` does these and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ledger.builders import new_job

from specbatch.jobs.cli.show import EXAMPLES, failed_row_lines
from specbatch.pipeline.bootstrap import (
    make_client,
    make_store,
    make_worker,
)
from specbatch.pipeline.operations.tools import first_rows
from specbatch.schemas.records import Artefact, DueWork, PromptRow, Prompts, Stage
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import load_spec
from support.databases import sqlite_store
from support.models import TinyPair

REASON = "the device fell over"


def silent(_: DueWork) -> None:
    """Nobody is there to be woken."""


def with_one_failing_row(folder: Path, pair: TinyPair, row: int) -> str:
    """A job whose input is read, and of which one row has used up its attempts."""
    settings = Settings()
    store = make_store(settings)
    spec = load_spec(
        {
            "input": {"uri": "prompts.parquet"},
            "output": {"uri": "out"},
            "verifier": str(pair.verifier),
            "sampling": {"max_tokens": 4},
            "group_size": 1,
        }
    )
    client = make_client(settings, silent, store)
    job_id = client.submit(spec.resolved(folder))[0].job_id
    worker = make_worker(settings, ("ingest",), silent, str(pair.verifier), None, store)
    worker.run(Stage.INGEST, job_id, None)
    for _ in range(settings.max_attempts):
        work = store.claim_group(job_id, row, Stage.VERIFY, "w", 60.0)
        assert work is not None
        store.release(work.lease, REASON)
    worker.lease_keeper.close()
    store.close()
    return job_id


def test_quarantined_rows_are_shown_and_retried_by_themselves(
    cli: Any, folder: Path, tiny_pair: TinyPair
) -> None:
    job_id = with_one_failing_row(folder, tiny_pair, row=3)
    ended = cli("retry", job_id, "--local", "--json")  # it is not at its end: it goes on
    assert (ended.code, ended.json["rows_failed"]) == (3, 1)
    shown = cli("show", job_id).out
    assert f"quarantined, failed: 1 (`specbatch retry {job_id} --quarantined`" in shown
    assert f"    row 3 (id row-3): {REASON}" in shown
    assert "group 3 failed" not in shown
    assert cli("show", job_id, "--json").json["rows_quarantined"] == 1
    again = cli("retry", job_id, "--quarantined", "--local", "--json")
    assert (again.code, again.json["rows_failed"]) == (0, 0)
    assert "nothing to retry" in cli("retry", job_id, "--quarantined").out
    assert cli("show", job_id, "--json").json["rows_quarantined"] == 0


def test_only_the_first_quarantined_rows_are_told_and_where_prompts_are_gone_no_names() -> None:
    rows = [PromptRow(i, f"id{i}", (1,), 0) for i in range(EXAMPLES)]
    lines = failed_row_lines("abc", ["broken"] * 1000, rows)
    assert lines[0].startswith("quarantined, failed: 1,000 (")
    assert lines[1:] == [f"    row {i} (id id{i}): broken" for i in range(EXAMPLES)]
    assert failed_row_lines("abc", [""], None)[1:] == ["    a row: no reason given"]


def test_prompts_that_are_gone_are_told_as_such(tmp_path: Path) -> None:
    job = sqlite_store().create_job(new_job(workspace_uri=str(tmp_path)))[0]
    gone = Artefact(f"{tmp_path}/nothing.arrow", "0" * 64, 1)
    assert first_rows(Settings(), job, [Prompts(gone, 0, 1)]) is None
    assert first_rows(Settings(), job, []) == []
