"""`submit-job --schedule FILE`: what `specbatch scheduler` does for one schedule, done once.

For plain cron and systemd timers. They may stand beside a scheduler: each time is run once.
"""

from __future__ import annotations

import time
from contextlib import closing
from datetime import date, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import typer

from specbatch.jobs.cli.checks import check_scheduled
from specbatch.jobs.cli.connect import check_broker_url, client
from specbatch.jobs.cli.console import complain, remark, say, say_json
from specbatch.jobs.cli.outcome import finish
from specbatch.jobs.cli.remote import follow
from specbatch.jobs.schedules.attempt import carry_out
from specbatch.jobs.schedules.definition import Schedule, load_schedule
from specbatch.jobs.schedules.ticker import Ticker
from specbatch.pipeline.bootstrap import make_store
from specbatch.schemas.errors import UsageError
from specbatch.schemas.schedules import LOST, RunState, ScheduleRun
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec

NOT_SUBMITTED = 2  # exit code


def submit_scheduled(
    settings: Settings,
    file: Path,
    logical_time: str | None,
    wait: bool,
    timeout_sec: float | None,
    json: bool,
) -> None:
    """Submit or run what is due, or one time that is named; with `wait`, follow the last job."""
    schedule = load_schedule(file)
    at = None if logical_time is None else time_of(schedule, logical_time)
    if schedule.is_job:
        check_broker_url(settings)  # it may be away: workers find the job in the store
    with closing(make_store(settings)) as store, client(settings) as c:
        here = partial(carry_out, settings, store)
        ticker = Ticker(store, c, time.time, check_scheduled, here)
        if at is not None:
            runs = ticker.run_at(schedule, at)
        else:  # who is started by a timer the first time comes a little late
            runs = ticker.tick(schedule, time.time() - schedule.fields.grace_sec)
        _print_result(schedule, runs)
        submitted = [run.job_id for run in runs if run.job_id]
        if wait and submitted:
            job = c.job(submitted[-1])
            follow(settings, c, job, JobSpec.model_validate(job.spec), timeout_sec)
            missed = any(run.state is RunState.FAILED for run in runs)
            finish(c, job.job_id, json, NOT_SUBMITTED if missed else 0)
    if json:
        say_json({"schedule": schedule.name, "runs": [_as_json(schedule, run) for run in runs]})
    else:
        for job_id in submitted:
            say(job_id)
    if any(run.state is RunState.FAILED for run in runs):
        raise typer.Exit(NOT_SUBMITTED)


def time_of(schedule: Schedule, text: str) -> float:
    """A logical time as it is written: with an offset, in the schedule's zone, or only its day.

    Of a day it is the first time. Raises `UsageError`.
    """
    try:
        if len(text) == len("2026-01-31"):
            return _first_of(schedule, date.fromisoformat(text))
        given = datetime.fromisoformat(text)
        if given.tzinfo is not None:
            return given.timestamp()
        return schedule.times.instant(given)
    except (ValueError, OverflowError):  # Python has the years 1 to 9999
        raise UsageError(
            f"--logical-time {text!r} is not a time: write 2026-01-31, 2026-01-31T02:30 (in the "
            "schedule's time zone) or 2026-01-31T01:30:00Z"
        ) from None


def _first_of(schedule: Schedule, day: date) -> float:
    begin = schedule.times.instant(datetime(day.year, day.month, day.day))
    first = next(schedule.times.after(begin - 1), None)
    end = schedule.times.instant(datetime(day.year, day.month, day.day) + timedelta(days=1))
    if first is None or first >= end:
        raise UsageError(f"schedule {schedule.name} ({schedule.timing}) has no time on {day}")
    return first


def _print_result(schedule: Schedule, runs: list[ScheduleRun]) -> None:
    """A line on stderr for each; cron mails them."""
    if not runs:
        remark(f"schedule {schedule.name}: nothing is due")
    for run in runs:
        when = schedule.times.local(run.logical_at).isoformat()
        why = f" ({run.reason})" if run.reason else ""
        job = f", job {run.job_id}" if run.job_id else ""
        say_it = complain if run.state in LOST else remark
        say_it(f"schedule {schedule.name}, {when}: {run.state}{job}{why}")


def _as_json(schedule: Schedule, run: ScheduleRun) -> dict[str, Any]:
    return {
        "logical_time": schedule.times.local(run.logical_at).isoformat(),
        "state": str(run.state),
        "job": run.job_id,
        "reason": run.reason,
    }
