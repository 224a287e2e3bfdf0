"""`specbatch schedules` and `submit-job --schedule`: what they say, do and exit with."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli.conftest import Cli

from specbatch.jobs.cli import scheduled
from specbatch.jobs.cli.scheduled import time_of
from specbatch.jobs.schedules.definition import load_schedule
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.schemas.errors import UsageError
from specbatch.schemas.schedules import RunState, ScheduleRun

TODAY = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
LAST = TODAY - timedelta(days=9)  # the only time of this year, well away from now
CRON = f"0 0 {LAST.day} {LAST.month} *"


@pytest.fixture
def place(folder: Path, monkeypatch: pytest.MonkeyPatch, redis_url: str) -> Path:
    """A folder of schedules, a workspace and a broker."""
    monkeypatch.setenv("SPECBATCH_WORKSPACE", str(folder / "work"))
    monkeypatch.setenv("SPECBATCH_BROKER_URL", redis_url)
    (folder / "jobs" / "schedules").mkdir(parents=True)
    return folder


def write(place: Path, name: str = "nightly", **fields: Any) -> Path:
    file = place / "jobs" / "schedules" / f"{name}.yaml"
    job = {"input": {"uri": "../../prompts.parquet"}, "output": {"uri": "out/{{ date }}"}}
    values = {"cron": CRON, "job": {**job, "verifier": "../../models/verifier"}, **fields}
    file.write_text(yaml.safe_dump(values))
    return file


@pytest.fixture
def store(place: Path) -> Iterator[SqlStore]:
    with closing(open_store(f"sqlite:///{place}/work/specbatch.db")) as opened:
        yield opened


def seen(store: SqlStore, file: Path, days: float = 30) -> None:
    """The schedule was first looked at so long ago."""
    schedule = load_schedule(file)
    since = time.time() // 1 + 0.5 - days * 86_400
    store.note_schedule_run(
        ScheduleRun(schedule.name, since, RunState.SEEN, reason=schedule.timing)
    )


def words_of(table: str) -> str:
    """The last column without spaces: its words and ids may be broken over lines."""
    heading, *rows = table.splitlines()
    return "".join(row[heading.index("state") :] for row in rows).replace(" ", "")


def test_without_files_or_a_folder_that_is_said(cli: Cli, place: Path) -> None:
    assert cli("schedules").out == "no schedules\n"
    (place / "jobs" / "schedules").rmdir()
    called = cli("schedules")
    assert called.code == 2
    assert "SPECBATCH_SCHEDULES_DIR" in called.err
    (place / "elsewhere").mkdir()
    assert cli("schedules", "--folder", "elsewhere").code == 0


def test_files_are_checked_without_a_store(cli: Cli, place: Path) -> None:
    write(place)
    called = cli("schedules", "--check")
    assert (called.code, called.out, called.err) == (0, "1 of 1 schedule files are right\n", "")
    wrong = write(place, "wrong", cron="* * *")
    called = cli("schedules", "--check")
    assert (called.code, called.out) == (2, "1 of 2 schedule files are right\n")
    assert called.err.startswith(f"error: schedule file {wrong.relative_to(place)}: field `cron`: ")
    assert called.err.count("\n") == 1
    assert not (place / "work").exists()


def test_a_schedule_is_listed_with_its_next_and_last_time(
    cli: Cli, place: Path, store: SqlStore
) -> None:
    file = write(place)
    assert "notimehascomeyet" in words_of(cli("schedules").out)
    seen(store, file)
    assert cli("submit-job", "--schedule", file).code == 0
    called = cli("schedules", "--json")
    (one,) = json.loads(called.out)
    (job,) = store.list_jobs()
    assert called.code == 0
    assert one == {
        "schedule": "nightly",
        "file": "jobs/schedules/nightly.yaml",
        "kind": "job",
        "cron": CRON,
        "time_zone": "UTC",
        "paused": False,
        "next": one["next"],
        "last": LAST.isoformat(),
        "state": "submitted",
        "job": job.job_id,
        "job_state": "queued",
        "reason": one["reason"],
        "waiting": 0,
        "lost": 0,
        "overdue_since": None,
    }
    assert one["reason"].startswith("caught up, 9 days")
    assert datetime.fromisoformat(one["next"]) > TODAY
    assert f"submitted,job{job.job_id}queued" in words_of(cli("schedules").out)
    assert cli("schedules", "--missed").out == "no schedule missed a time\n"


def test_a_missed_time_and_an_overdue_one_are_reported_by_the_exit_code(
    cli: Cli, place: Path, store: SqlStore
) -> None:
    file = write(place, catch_up="none")
    seen(store, file)
    called = cli("schedules", "--missed", "--json")
    (one,) = json.loads(called.out)
    assert (called.code, one["overdue_since"], one["lost"]) == (3, LAST.isoformat(), 0)
    assert "is`specbatchscheduler`running?" in words_of(cli("schedules", "--missed").out)
    called = cli("submit-job", "--schedule", file)
    assert (called.code, called.out) == (0, "")
    assert called.err.startswith(f"error: schedule nightly, {LAST.isoformat()}: missed (no ")
    called = cli("schedules", "--missed", "--json")
    (one,) = json.loads(called.out)
    assert (called.code, one["state"], one["lost"]) == (3, "missed", 1)
    assert one["overdue_since"] is None
    called = cli("submit-job", "--schedule", file, "--logical-time", f"{LAST:%Y-%m-%d}")
    assert (called.code, len(store.list_jobs())) == (0, 1)
    assert cli("schedules", "--missed").code == 0


def test_a_timer_that_comes_again_submits_nothing_again(
    cli: Cli, place: Path, store: SqlStore
) -> None:
    file = write(place)
    seen(store, file)
    first = cli("submit-job", "--schedule", file)
    (job,) = store.list_jobs()
    assert (first.code, first.out) == (0, f"{job.job_id}\n")
    again = cli("submit-job", "--schedule", file)
    assert (again.code, again.out) == (0, "")
    assert again.err == "schedule nightly: nothing is due\n"
    for time_text in (f"{LAST:%Y-%m-%d}", f"{LAST:%Y-%m-%dT%H:%M}", f"{LAST.isoformat()}"):
        named = cli("submit-job", "--schedule", file, "--logical-time", time_text, "--json")
        (run,) = json.loads(named.out)["runs"]
        assert (run["job"], run["logical_time"]) == (job.job_id, LAST.isoformat())
    assert len(store.list_jobs()) == 1


def test_upkeep_needs_no_broker(
    cli: Cli, place: Path, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBATCH_BROKER_URL", "memory://")
    file = place / "jobs" / "schedules" / "money.yaml"
    file.write_text(yaml.safe_dump({"cron": CRON, "kind": "spend"}))
    called = cli("submit-job", "--schedule", file, "--logical-time", f"{LAST:%Y-%m-%d}")
    assert called.code == 0, called.err
    (run,) = store.schedule_runs("money")
    assert run.state is RunState.DONE
    assert "the broker is memory://" in cli("submit-job", "--schedule", write(place)).complaint


def test_what_cannot_be_submitted_is_an_error(cli: Cli, place: Path, store: SqlStore) -> None:
    file = write(place)
    seen(store, file)
    (place / "prompts.parquet").unlink()
    called = cli("submit-job", "--schedule", file)
    assert (called.code, called.out) == (2, "")
    assert "prompts.parquet does not exist" in called.err
    (run,) = store.schedule_runs("nightly")
    assert run.state is RunState.FAILED


def test_who_waits_follows_the_job(cli: Cli, place: Path, store: SqlStore) -> None:
    file = write(place)
    seen(store, file)
    called = cli("submit-job", "--schedule", file, "--wait", "--timeout", 0)
    assert called.code == 6, called.err  # there is no worker
    (job,) = store.list_jobs()
    assert f"job {job.job_id} is still queued" in called.err


def test_who_waits_hears_of_a_night_that_was_not_submitted(
    cli: Cli, place: Path, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a later one was, and ended well."""
    job = {"input": {"uri": "../../{{ date }}.parquet"}, "output": {"uri": "out/{{ date }}"}}
    job["verifier"] = "../../models/verifier"
    file = write(place, cron="0 0 * * *", catch_up="all", job=job)
    seen(store, file, days=2.0)
    (place / f"{TODAY:%Y-%m-%d}.parquet").write_bytes((place / "prompts.parquet").read_bytes())
    left: list[int] = []
    monkeypatch.setattr(scheduled, "follow", lambda *_: None)
    monkeypatch.setattr(scheduled, "finish", lambda *how: left.append(how[-1]))
    cli("submit-job", "--schedule", file, "--wait")
    states = {run.state for run in store.schedule_runs("nightly")}
    assert states >= {RunState.FAILED, RunState.SUBMITTED}
    assert left == [scheduled.NOT_SUBMITTED]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--logical-time", "2026-01-01"], "--logical-time needs --schedule"),
        (["spec.yaml", "--schedule", "s.yaml"], "leave spec out"),
        (["--schedule", "s.yaml", "--max-tokens", "4"], "leave sampling.max_tokens out"),
        (["--schedule", "s.yaml", "--local"], "leave --local and --dry-run out"),
        (["--schedule", "nowhere.yaml"], "schedule file nowhere.yaml does not exist"),
    ],
)
def test_flags_that_do_not_go_together(
    cli: Cli, folder: Path, flags: list[str], problem: str
) -> None:
    assert folder.is_dir()
    called = cli("submit-job", *flags)
    assert called.code == 2
    assert problem in called.err


def test_a_logical_time_is_read_in_the_schedules_zone(place: Path) -> None:
    file = write(place, cron="30 2,14 * * *", time_zone="Europe/Berlin")
    schedule = load_schedule(file)
    utc = {
        "2026-01-31T02:30": "2026-01-31T01:30",
        "2026-01-31": "2026-01-31T01:30",
        "2026-01-31T01:30:00Z": "2026-01-31T01:30",
        "2026-03-29T02:30": "2026-03-29T01:00",  # skipped
        "2026-03-29": "2026-03-29T01:00",
        "2026-10-25T02:30": "2026-10-25T00:30",  # comes twice
        "2026-10-25T02:30+01:00": "2026-10-25T01:30",
    }
    for text, expected in utc.items():
        assert time_of(schedule, text) == datetime.fromisoformat(f"{expected}Z").timestamp(), text
    for text in ("tonight", "2026-02-30", "26-1-1", "9999-12-31", "0001-01-01"):
        with pytest.raises(UsageError, match="is not a time: write"):
            time_of(schedule, text)
    weekly = load_schedule(write(place, "weekly", cron="0 0 * * 0"))
    with pytest.raises(UsageError, match="has no time on 2026-01-31"):
        time_of(weekly, "2026-01-31")
