"""`specbatch logs`: what workers logged about one job, chosen by worker, level and time."""

from __future__ import annotations

import json
import logging
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import run_in
from cli.test_results import in_store
from ledger.builders import JOB

from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.logs import time_of
from specbatch.jobs.cli.second_process import SecondProcess
from specbatch.pipeline.bootstrap import make_store
from specbatch.schemas.errors import UsageError
from specbatch.schemas.settings import Settings
from support.models import TinyPair
from support.workers import wait_until


@pytest.fixture
def logged(folder: Path) -> Path:
    """The logs of a job, of two workers."""
    in_store(folder)
    where = folder / "specbatch-data" / "logs" / JOB
    where.mkdir(parents=True)
    of_one = [
        {"time": "2026-01-02T00:00:00.000+00:00", "level": "INFO", "message": "begun"},
        {"time": "2026-01-02T00:00:02.000+00:00", "level": "ERROR", "message": "lost",
         "stage": "verify", "group": 2, "traceback": "Traceback\n  File x"},
    ]  # fmt: skip
    of_two = [{"time": "2026-01-02T00:00:01.000+00:00", "level": "WARNING", "message": "a\x1bb"}]
    for name, lines in (("one-1", of_one), ("two-2", of_two)):
        (where / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return where


def test_all_is_printed_by_time_and_from_where_is_said(cli: Any, logged: Path) -> None:
    done = cli("logs", JOB[:9])
    assert done.code == 0
    assert done.err.replace("\n", "") == f"logs of 2 workers: {logged}"
    assert done.out.splitlines() == [
        "2026-01-02T00:00:00.000+00:00 INFO one-1: begun",
        "2026-01-02T00:00:01.000+00:00 WARNING two-2: a\\x1bb",
        "2026-01-02T00:00:02.000+00:00 ERROR one-1 (verify group 2): lost",
        "    Traceback",
        "      File x",
    ]


@pytest.mark.usefixtures("logged")
def test_records_are_chosen(cli: Any) -> None:
    def found(*flags: str) -> list[str]:
        lines = cli("logs", JOB, "--json", *flags).out.splitlines()
        return [json.loads(line)["message"] for line in lines]

    assert found() == ["begun", "a\x1bb", "lost"]
    assert found("--level", "warning") == ["a\x1bb", "lost"]
    assert found("--worker", "one:1") == ["begun", "lost"]
    assert found("--since", "2026-01-02T00:00:01+00:00") == ["a\x1bb", "lost"]
    assert found("--since", "1h") == []
    assert cli("logs", JOB, "--level", "loud").code == 2
    assert "neither an age nor a time" in cli("logs", JOB, "--since", "soon").complaint


def test_who_follows_sees_what_is_logged_until_the_job_ends(
    cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_store(folder, has_ended=False)
    path = folder / "specbatch-data" / "logs" / JOB / "one-1.jsonl"

    def logged_now(message: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"time": "2026-01-02T00:00:00.000+00:00", "level": "INFO", "message": message}
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    pauses = iter(range(4))

    class Pause:
        def wait(self, _sec: float) -> None:
            number = next(pauses)
            logged_now(f"pause {number}")
            if number == 2:
                database = sqlite3.connect(folder / "specbatch-data" / "specbatch.db")
                with database:
                    database.execute("UPDATE jobs SET state = 'done'")
                database.close()

    monkeypatch.setattr("specbatch.jobs.cli.logs.Event", Pause)
    done = cli("logs", JOB, "--follow")
    assert done.code == 0, done.err
    assert "its workers have logged nothing about it" in done.err.replace("\n", " ")
    assert [line.rpartition(": ")[2] for line in done.out.splitlines()] == [
        "pause 0", "pause 1", "pause 2",
    ]  # fmt: skip
    assert len(cli("logs", JOB, "-f").out.splitlines()) == 3, "a job that has ended: at once"


@pytest.mark.usefixtures("logged")
def test_ctrl_c_stops_following_without_an_error(cli: Any, folder: Path, monkeypatch: Any) -> None:
    database = sqlite3.connect(folder / "specbatch-data" / "specbatch.db")
    with database:
        database.execute("UPDATE jobs SET state = 'running'")
    database.close()

    class Interrupted:
        def wait(self, _sec: float) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr("specbatch.jobs.cli.logs.Event", Interrupted)
    done = cli("logs", JOB, "-f")
    assert (done.code, len(done.out.splitlines())) == (0, 5)


def test_an_age_counts_from_now_and_a_time_is_one_of_this_place() -> None:
    now = datetime(2026, 1, 2, 3, 0, tzinfo=UTC)
    assert time_of("90m", now) == "2026-01-02T01:30:00.000+00:00"
    assert time_of("1.5h", now) == time_of("90m", now)
    assert time_of("2026-01-02T03:00+02:00") == "2026-01-02T01:00:00.000+00:00"
    here = datetime(2026, 1, 2).astimezone(UTC).isoformat(timespec="milliseconds")
    assert time_of("2026-01-02") == here
    with pytest.raises(UsageError, match="is neither an age nor a time"):
        time_of("-3h")


@pytest.mark.parametrize(
    "text", ["1000000d", "99999999999999d", f"{'9' * 400}s", "0001-01-01T00:00:00+14:00"]
)
def test_a_time_that_python_does_not_have_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--since .* is before the year 1 or after 9999"):
        time_of(text)


def test_where_nothing_is_the_reason_is_said(
    cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_store(folder)
    done = cli("logs", JOB)
    assert (done.code, done.out) == (0, "")
    assert "workers logged nothing about it" in done.err.replace("\n", " ")
    monkeypatch.setenv("SPECBATCH_JOB_LOG_DAYS", "0")
    assert "SPECBATCH_JOB_LOG_DAYS is 0" in cli("logs", JOB).err.replace("\n", " ")


def test_a_workspace_on_s3_has_none(
    cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder / "specbatch-data" / "specbatch.db"
    in_store(folder)
    made = make_store(Settings())
    made.close()
    monkeypatch.setenv("SPECBATCH_DATABASE_URL", f"sqlite:///{store}")
    monkeypatch.setenv("SPECBATCH_WORKSPACE", "s3://bucket/work")
    monkeypatch.setattr("specbatch.jobs.cli.logs.workspace_of", lambda _: "s3://bucket/work")
    refused = cli("logs", JOB)
    assert refused.code == 2
    assert "the workspace s3://bucket/work is not a local folder" in refused.complaint


@pytest.mark.pipeline  # starts a process
def test_the_second_process_logs_to_the_console_and_to_its_jobs_and_purge_deletes_it(
    redis_url: str,
    folder: Path,
    tiny_pair: TinyPair,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SPECBATCH_BROKER_URL", redis_url)
    caplog.set_level(logging.INFO, "specbatch")  # as a worker's, which it logs at, too
    (folder / "taken").mkdir()
    (folder / "taken" / "manifest.json").write_text("{}")  # so that reading the input fails the job
    order = ("--input", "prompts.parquet", "--verifier", tiny_pair.verifier, "--output", "taken")
    console = ""

    def has_told(why: str) -> bool:
        nonlocal console
        console += capfd.readouterr().err
        return f"INFO {why}" in console

    with closing(SecondProcess(load_settings(), 1)) as second:
        ended = run_in(folder, "submit-job", *order, "--proposer", "none", "--wait", "--json")
        assert ended.code == 4, ended.err
        job = ended.json["job"]
        why = f"job {job} fails: output {folder / 'taken'} already holds manifest.json"
        wait_until("its console has it", lambda: has_told(why))
        its_own = str(second.pid)
    logs = folder / "specbatch-data" / "logs" / job
    printed = run_in(folder, "logs", job, "--json")
    assert printed.code == 0, printed.err
    assert str(logs) in printed.err.replace("\n", "")
    (line,) = [json.loads(text) for text in printed.out.splitlines() if "fails" in text]
    assert line["message"].startswith(why)
    assert line["stage"] == "ingest"
    assert line["worker"].rpartition(":")[2] == its_own
    purged = run_in(folder, "purge", "--job", job)
    assert purged.code == 0, purged.err
    assert not logs.exists()
