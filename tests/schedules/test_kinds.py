"""Times that are no job: they run once, through deaths and errors, and tell how they ended."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from ledger.builders import Clock
from schedules.conftest import Site, Write, at

from specbatch.jobs.cli.schedule_process import Processes
from specbatch.jobs.schedules.attempt import MOST_ATTEMPTS, Attempt, carry_out
from specbatch.jobs.schedules.definition import Schedule, load_schedule
from specbatch.jobs.schedules.kinds import KINDS, Kind, Options, Outcome
from specbatch.jobs.schedules.listing import standing
from specbatch.jobs.schedules.ticker import Ticker
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.schemas.errors import SpecbatchError, SpecError, StoreError, UsageError
from specbatch.schemas.schedules import RUN_LEASE_SEC, RunState, ScheduleRun
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec
from support.webhooks import receiving
from support.workers import wait_until

EVE, RUN_AT = "2026-01-01T00:00Z", "2026-01-01T02:30Z"
Does = Callable[[], Outcome]


class Counted(Options):
    count: int = 1


@pytest.fixture
def does(monkeypatch: pytest.MonkeyPatch) -> list[Does]:
    """What the kind `tried` does, one entry an attempt."""
    todo: list[Does] = []
    kind = Kind(Counted, lambda *_: todo.pop(0)())
    monkeypatch.setitem(KINDS, "tried", kind)  # type: ignore[arg-type]  # a dict, here
    return todo


def tried(site: Site, **fields: Any) -> Schedule:
    file = site.folder / "upkeep.yaml"
    file.write_text(yaml.safe_dump({"cron": "30 2 * * *", "kind": "tried", **fields}))
    return load_schedule(file)


def here(site: Site, **settings: Any) -> Ticker:
    """A ticker that runs attempts in this process."""

    def start(attempt: Attempt) -> None:
        carry_out(Settings(**settings), site.store, attempt)

    return site.ticker(start=start)


def tick(site: Site, ticker: Ticker, schedule: Schedule, when: str) -> list[ScheduleRun]:
    site.clock.now = at(when)
    return ticker.tick(schedule)


def row_of(site: Site, schedule: Schedule) -> ScheduleRun:
    (row,) = site.store.schedule_runs(schedule.name)
    return row


def raising(error: BaseException) -> Does:
    def do() -> Outcome:
        raise error

    return do


def test_a_time_runs_and_its_row_says_what_was_found(any_site: Site, does: list[Does]) -> None:
    schedule, ticker = tried(any_site), here(any_site)
    does.append(lambda: Outcome("3 jobs are well"))
    tick(any_site, ticker, schedule, EVE)
    tick(any_site, ticker, schedule, RUN_AT)
    row = row_of(any_site, schedule)
    assert (row.state, row.reason, row.attempts) == (RunState.DONE, "3 jobs are well", 1)
    told = any_site.store.figures().schedules[schedule.name]
    assert (told.last_success_at, told.failed, told.missed) == (any_site.clock.now, 0, 0)
    assert told.duration_sec == 0.0
    assert standing(schedule, any_site.store, any_site.clock.now).words == "done: 3 jobs are well"
    assert tick(any_site, ticker, schedule, "2026-01-01T02:31Z") == []


def test_an_attempt_that_dies_is_begun_again_and_at_last_given_up(
    any_site: Site, does: list[Does]
) -> None:
    schedule = tried(any_site)
    dying: list[Attempt] = []
    ticker = any_site.ticker(start=dying.append)
    tick(any_site, ticker, schedule, EVE)
    tick(any_site, ticker, schedule, RUN_AT)
    for number in range(1, MOST_ATTEMPTS + 2):
        assert [one.run.attempts for one in dying] == list(range(1, number + 1))
        any_site.clock.advance(RUN_LEASE_SEC)
        ticker.tick(schedule)
        assert len(dying) == number  # it may still live
        any_site.clock.advance(1)
        if number <= MOST_ATTEMPTS:
            ticker.tick(schedule)
    carry_out(Settings(), any_site.store, dying[-1])
    row = row_of(any_site, schedule)
    assert (row.state, does) == (RunState.FAILED, [])
    assert row.reason == "given up: its process died in the last of 3 attempts"
    told = any_site.store.figures().schedules[schedule.name]
    assert (told.failed, told.missed, told.last_success_at) == (1, 0, None)


def test_an_error_that_may_pass_is_tried_again_when_the_lease_is_over(
    site: Site, does: list[Does]
) -> None:
    schedule, ticker = tried(site), here(site)
    does += [raising(StoreError("the store is away")), lambda: Outcome("done now")]
    tick(site, ticker, schedule, EVE)
    tick(site, ticker, schedule, RUN_AT)
    assert row_of(site, schedule).reason == "attempt 1 of 3: the store is away"
    assert standing(schedule, site.store, site.clock.now).is_well
    site.clock.advance(RUN_LEASE_SEC + 1)
    ticker.tick(schedule)
    row = row_of(site, schedule)
    assert (row.state, row.reason, row.attempts) == (RunState.DONE, "done now", 2)


def test_the_last_of_the_attempts_fails_the_time(site: Site, does: list[Does]) -> None:
    schedule, ticker = tried(site), here(site)
    does += [raising(ZeroDivisionError("by zero"))] * MOST_ATTEMPTS
    tick(site, ticker, schedule, EVE)
    tick(site, ticker, schedule, RUN_AT)
    for _ in range(MOST_ATTEMPTS):
        site.clock.advance(RUN_LEASE_SEC + 1)
        ticker.tick(schedule)
    row = row_of(site, schedule)
    assert (row.state, does) == (RunState.FAILED, [])
    assert row.reason == "attempt 3 of 3: ZeroDivisionError: by zero"


@pytest.mark.parametrize(
    "do", [raising(UsageError("no retention is set")), lambda: Outcome("2 differ", is_well=False)]
)
def test_what_is_wrong_itself_or_found_wrong_fails_at_once(
    site: Site, does: list[Does], do: Does
) -> None:
    schedule, ticker = tried(site), here(site)
    does.append(do)
    tick(site, ticker, schedule, EVE)
    tick(site, ticker, schedule, RUN_AT)
    assert row_of(site, schedule).state is RunState.FAILED
    assert not standing(schedule, site.store, site.clock.now).is_well
    does.append(lambda: Outcome("mended"))
    assert ticker.run_at(schedule, at(RUN_AT))[-1].state is RunState.DONE  # by hand, once more


def test_an_interrupt_gives_the_time_back(site: Site, does: list[Does]) -> None:
    schedule, ticker = tried(site), here(site)
    does += [raising(KeyboardInterrupt()), lambda: Outcome("done now")]
    tick(site, ticker, schedule, EVE)
    with pytest.raises(KeyboardInterrupt):
        tick(site, ticker, schedule, RUN_AT)
    given_back = row_of(site, schedule)
    assert (given_back.state, given_back.attempts) == (RunState.QUEUED, 0)
    ticker.tick(schedule)
    assert row_of(site, schedule).state is RunState.DONE


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (None, RunState.SUBMITTED),
        (UsageError("no such input"), RunState.FAILED),
        (StoreError("the store is away"), RunState.RUNNING),  # the next check tries again
    ],
)
def test_a_dead_attempt_whose_schedule_is_now_a_job_is_submitted_once(
    site: Site, error: SpecbatchError | None, state: RunState
) -> None:
    ticker = site.ticker()  # its attempts die at once
    schedule = tried(site, kind="purge")
    tick(site, ticker, schedule, EVE)
    tick(site, ticker, schedule, RUN_AT)
    checked: list[JobSpec] = []

    def check(spec: JobSpec) -> None:
        assert not checked, "the time is begun again"
        checked.append(spec)
        if error is not None:
            raise error

    site.clock.advance(RUN_LEASE_SEC + 1)
    job = site.schedule("30 2 * * *", "upkeep")
    site.ticker(check=check).tick(job)
    assert row_of(site, job).state is state
    assert len(site.store.list_jobs()) == (state is RunState.SUBMITTED)


def test_of_two_tickers_one_has_the_time_and_a_lost_attempt_writes_nothing(site: Site) -> None:
    schedule = site.schedule("30 2 * * *", "other")
    waiting = ScheduleRun("upkeep", at(RUN_AT), RunState.QUEUED)
    site.store.note_schedule_run(waiting)
    first = site.store.claim_schedule_run(waiting)
    assert first is not None
    assert site.store.claim_schedule_run(waiting) is None
    site.clock.advance(RUN_LEASE_SEC + 1)
    second = site.store.claim_schedule_run(waiting)
    assert second is not None
    assert (first.attempts, second.attempts) == (1, 2)
    assert not site.store.hold_schedule_run(first)
    assert site.store.hold_schedule_run(second)
    assert schedule.is_job


@pytest.mark.parametrize(
    ("overlap", "states"),
    [
        ("skip", [RunState.RUNNING, RunState.SKIPPED]),
        ("queue", [RunState.RUNNING, RunState.QUEUED]),
        ("cancel-old", [RunState.SKIPPED, RunState.RUNNING]),
    ],
)
def test_a_time_that_comes_meanwhile_is_treated_as_that_of_a_job(
    site: Site, does: list[Does], overlap: str, states: list[RunState]
) -> None:
    schedule, ticker = tried(site, cron="* * * * *", overlap=overlap), site.ticker()
    for when in ("2026-01-01T02:29:30Z", RUN_AT, "2026-01-01T02:31Z"):
        tick(site, ticker, schedule, when)
    assert list(site.states(schedule).values()) == states
    assert does == []


def test_targets_hear_how_a_time_ended(site: Site, does: list[Does], tmp_path: Path) -> None:
    with receiving() as server:
        targets = tmp_path / "targets.yml"
        targets.write_text(yaml.safe_dump({"ops": {"url": server.url}}))
        schedule, ticker = tried(site, notify=["ops"]), here(site, notify_file=str(targets))
        does.append(lambda: Outcome("1 of 8 differs", is_well=False))
        tick(site, ticker, schedule, EVE)
        tick(site, ticker, schedule, RUN_AT)
        (said,) = [orjson.loads(body) for _, body in server.got]
    assert (said["type"], said["name"], said["kind"]) == ("schedule.failed", "upkeep", "tried")
    assert (said["reason"], said["logical_time"]) == ("1 of 8 differs", "2026-01-01T02:30:00Z")


def test_a_target_that_cannot_be_told_keeps_no_end_from_being_written(
    site: Site, does: list[Does], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = tmp_path / "targets.yml"
    targets.write_text(yaml.safe_dump({"ops": {"url": "http://127.0.0.1:9"}}))
    schedule, ticker = tried(site, notify=["ops"]), here(site, notify_file=str(targets))
    monkeypatch.setattr("specbatch.jobs.schedules.attempt.send", raising(KeyError("a fault")))
    does.append(lambda: Outcome("3 jobs are well"))
    tick(site, ticker, schedule, EVE)
    tick(site, ticker, schedule, RUN_AT)
    assert row_of(site, schedule).state is RunState.DONE


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "sweep", "job": None}, "field `kind`: must be one of job, "),
        ({"kind": "purge"}, "field `job`: goes with `kind: job` alone; purge has `options`"),
        ({"options": {"count": 1}}, "field `options`: goes with another kind than `job`"),
        (
            {"kind": "purge", "job": None, "options": {"tenent": "acme"}},
            "options of kind purge: unknown field `tenent` (did you mean `tenant`?)",
        ),
        (
            {"kind": "mismatches", "job": None, "options": {"days": math.inf}},
            "options of kind mismatches: field `days`: must be a finite number (got inf)",
        ),
        ({"grace_sec": math.inf}, "field `grace_sec`: must be a finite number (got inf)"),
    ],
)
def test_a_wrong_kind_is_said(write: Write, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as raised:
        load_schedule(write(**fields))
    assert said in str(raised.value)


@pytest.mark.pipeline  # starts processes
def test_a_process_that_is_killed_is_seen_and_the_next_one_runs_the_time(tmp_path: Path) -> None:
    settings = Settings(workspace=str(tmp_path / "work"), retention_days={"acme": 30})
    make_store(settings).close()
    clock = Clock()
    site = Site(open_store(settings.store_url, clock=clock), clock, tmp_path)
    file = tmp_path / "tidy.yaml"
    file.write_text(yaml.safe_dump({"cron": "0 0 29 2 *", "kind": "purge"}))
    schedule, processes = load_schedule(file), Processes(settings)
    ticker = site.ticker(start=processes.start)
    clock.now = time.time() - 2 * RUN_LEASE_SEC
    site.store.note_schedule_run(ScheduleRun("tidy", clock.now, RunState.QUEUED))
    ticker.tick(schedule)
    (first,) = processes.pids()
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    row = row_of(site, schedule)
    assert (row.state, row.attempts) == (RunState.RUNNING, 1)
    clock.now = time.time()
    ticker.tick(schedule)
    wait_until("it is done", lambda: row_of(site, schedule).state is RunState.DONE)
    row = row_of(site, schedule)
    assert (row.reason, row.attempts) == ("0 jobs purged, 0 rows", 2)
    processes.close()
    site.store.close()
