"""`specbatch scheduler` as a process: it submits, a worker does the job, Ctrl-C ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
import yaml
from celery import Celery
from ledger.builders import Clock
from schedules.conftest import Site, at, silent

from specbatch.jobs.schedules.beat import POLL_SEC, Rounds, ScheduleBeat, run_beat
from specbatch.jobs.schedules.definition import Folder, load_schedule
from specbatch.jobs.schedules.ticker import Ticker
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.runtime.client import Client
from specbatch.schemas.errors import StoreError
from specbatch.schemas.records import JobState
from specbatch.schemas.schedules import RunState, ScheduleRun
from specbatch.schemas.settings import Settings
from specbatch.workers.app import make_app
from support import demo
from support.databases import new_database, sqlite_store
from support.workers import BIN, wait_until, worker

pytestmark = pytest.mark.pipeline  # starts processes

JOB = {
    "input": {"uri": "prompts.parquet"},
    "output": {"uri": "out/{{ logical_time.compact }}"},
    "verifier": str(demo.VERIFIER),
    "sampling": {"max_tokens": 8},
}


@contextmanager
def scheduler(name: str, environment: dict[str, str], cwd: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [str(BIN / "specbatch"), "scheduler"],
        env=os.environ | environment,
        cwd=cwd,
        stdout=subprocess.DEVNULL,
        stderr=(cwd / f"{name}.log").open("w"),
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_two_schedulers_submit_a_job_once_and_a_worker_does_it(
    tmp_path: Path, redis_url: str
) -> None:
    files = tmp_path / "jobs" / "schedules"
    files.mkdir(parents=True)
    pq.write_table(pq.read_table(demo.PROMPTS).slice(0, 8), files / "prompts.parquet")
    file = files / "nightly.yaml"
    file.write_text(yaml.safe_dump({"cron": "0 0 1 1 *", "job": JOB}))
    environment = {
        "SPECBATCH_BROKER_URL": redis_url,
        "SPECBATCH_WORKSPACE": str(tmp_path / "work"),
    }
    with closing(make_store(Settings(workspace=str(tmp_path / "work")))) as store:
        schedule = load_schedule(file)
        long_ago = ScheduleRun(
            "nightly", time.time() - 400 * 86_400, RunState.SEEN, reason=schedule.timing
        )
        store.note_schedule_run(long_ago)  # so that this year's time is due

        with (
            scheduler("one", environment, tmp_path) as one,
            scheduler("other", environment, tmp_path) as other,
            worker("all", "--verifier", str(demo.VERIFIER), environment=environment, cwd=tmp_path),
        ):
            done = [JobState.DONE]
            wait_until("the job is done", lambda: [j.state for j in store.list_jobs()] == done)
            both = [tmp_path / "one.log", tmp_path / "other.log"]
            wait_until("both have begun", lambda: all("Starting" in f.read_text() for f in both))
            for process, number in ((one, signal.SIGINT), (other, signal.SIGTERM)):
                process.send_signal(number)
                assert process.wait(30) == 0
        (run,) = store.schedule_runs()
        (job,) = store.list_jobs()
        assert (run.state, run.job_id, job.name) == (RunState.SUBMITTED, job.job_id, "nightly")
        assert (Path(job.output_uri) / "manifest.json").is_file()
    for log in both:
        assert log.read_text().endswith("scheduler ended\n")
        assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_whose_interrupt_is_lost_ends_it_after_the_round(
    rest: Rest, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    rounds = 0

    def go(_: Rounds) -> float:
        nonlocal rounds
        rounds += 1
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        return 0.0

    monkeypatch.setattr(Rounds, "go", go)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        run_beat(Celery(broker="memory://"), Folder(rest.site.folder), cast(Ticker, None))
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert rounds == 1


# --- rounds, with a clock that stands still -------------------------------------------------


class Rest:
    """A store, files and rounds over them."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.site = Site(sqlite_store(self.clock), self.clock, folder)

    def rounds(self, store: Store | None = None) -> Rounds:
        store = store or self.site.store
        ticker = Ticker(store, Client(store, silent, "file:///w"), self.clock)
        return Rounds(Folder(self.site.folder), ticker, self.clock)


@pytest.fixture
def rest(tmp_path: Path) -> Rest:
    return Rest(tmp_path)


def test_beat_sleeps_until_the_next_time_and_never_long(rest: Rest) -> None:
    rest.clock.now = at("2026-01-01T00:00Z")
    beat = ScheduleBeat(rest.rounds(), app=make_app(Settings()))
    assert beat.tick() == POLL_SEC
    hourly = rest.site.schedule("0 * * * *", "hourly")
    rest.clock.now = at("2026-01-01T00:59:58Z")
    assert beat.tick() == 2.0
    assert rest.site.states(hourly) == {}
    rest.clock.now = at("2026-01-01T01:00Z")
    assert beat.tick() == POLL_SEC
    assert rest.site.states(hourly) == {rest.clock.now: RunState.SUBMITTED}


def test_a_restart_takes_up_where_the_last_one_was(rest: Rest) -> None:
    nightly = rest.site.schedule("30 2 * * *", catch_up="all")
    rest.clock.now = at("2026-01-01T00:00Z")
    rest.rounds().go()
    rest.clock.now = at("2026-01-02T12:00Z")
    rest.rounds().go()
    states = [RunState.SUBMITTED, RunState.QUEUED]
    assert list(rest.site.states(nightly).values()) == states
    rest.rounds().go()
    assert list(rest.site.states(nightly).values()) == states


def test_one_schedule_that_fails_keeps_no_other_from_its_time(
    rest: Rest, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(SqlStore):
        def schedule_runs(self, name: str | None = None, *more: Any, **few: Any) -> Any:
            if name == "b":
                raise StoreError("the database is out of reach")
            if name == "c":
                raise ZeroDivisionError
            return super().schedule_runs(name, *more, **few)

    store = Failing(new_database(), clock=rest.clock)
    for name in "abcd":
        rest.site.schedule("30 2 * * *", name)
    rounds = rest.rounds(store)
    for now in ("2026-01-01T00:00Z", "2026-01-01T02:30Z"):
        rest.clock.now = at(now)
        rounds.go()
    assert sorted(job.name for job in store.list_jobs()) == ["a", "d"]
    assert "schedule b: the database is out of reach" in caplog.text
    assert "schedule c could not be checked" in caplog.text


def test_without_its_folder_beat_goes_on_looking(rest: Rest) -> None:
    folder = rest.site.folder / "later"
    ticker = rest.site.ticker()
    rounds = Rounds(Folder(folder), ticker, rest.clock)
    assert rounds.go() == POLL_SEC
