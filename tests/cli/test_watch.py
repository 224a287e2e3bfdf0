"""`specbatch watch`: a job to its end, with its exit code; Ctrl-C ends only the watching."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cli.test_results import in_store
from ledger.builders import JOB, LEASE_SEC

from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.runtime import client
from specbatch.schemas.records import JobState, Stage
from specbatch.schemas.settings import Settings


def test_an_ended_job_is_told_at_once_with_its_exit_code(cli: Any, folder: Path) -> None:
    in_store(folder)  # is partial
    done = cli("watch", JOB[:8])
    assert done.code == 3
    assert done.err.startswith("partial: ")
    assert "some rows failed" in done.err
    assert cli("watch", JOB, "--json").json["state"] == "partial"


def test_each_change_is_a_line_until_the_end(
    cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_store(folder, has_ended=False)
    looks = 0

    def ends_at_the_third_look(_seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            store = make_store(Settings())
            publish = store.claim_job(JOB, Stage.PUBLISH, "p", LEASE_SEC)
            assert publish is not None
            store.finish_job(publish.lease, JobState.DONE)
            store.close()

    monkeypatch.setattr(client.time, "sleep", ends_at_the_third_look)
    done = cli("watch", JOB)
    assert (done.code, looks) == (0, 3)
    lines = [line for line in done.err.splitlines() if "prompts" in line]
    assert [line.partition(":")[0] for line in lines] == ["writing", "done"]
    assert "state" in done.out, "then the summary is printed"


def test_an_interrupted_job_is_said_to_be_one(
    cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_store(folder, has_ended=False)
    with closing(sqlite3.connect(folder / "specbatch-data" / "specbatch.db")) as database, database:
        database.execute("UPDATE worker_sessions SET beat_at = 1, started_at = 1")  # long ago

    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(client.time, "sleep", interrupt)
    done = cli("watch", JOB)
    assert done.code == 130
    told = done.err.replace("\n", " ")
    assert f"`specbatch retry {JOB} --local` resumes it" in told
    assert f"stopped watching; job {JOB} is not stopped by this" in told
    store = make_store(Settings())
    assert not store.get_job(JOB).cancel_requested
    store.close()


def test_a_timeout_ends_the_watching_with_6(cli: Any, folder: Path) -> None:
    in_store(folder, has_ended=False)
    done = cli("watch", JOB, "--timeout", 0)
    assert done.code == 6
    assert "it keeps running" in done.complaint
