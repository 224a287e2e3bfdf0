"""Whenever somebody looks, each time of a walk through every minute gets one row, and one job."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger.builders import Clock
from schedules.conftest import Site
from schedules.test_cron import CHANGES, walk

from specbatch.schemas.schedules import RunState
from support.databases import sqlite_store

EXPRESSIONS = ("30 2 * * *", "0 */3 * * *", "15 * * * *", "0,30 1,2,3 * * *", "@daily")


@pytest.mark.pipeline  # many lives of a store
@given(
    place=st.sampled_from(CHANGES),
    cron=st.sampled_from(EXPRESSIONS),
    catch_up=st.sampled_from(["none", "latest", "all"]),
    looks_sec=st.lists(st.integers(0, 2 * 1440 * 60), min_size=1, max_size=8, unique=True),
)
@settings(max_examples=20, deadline=None)
def test_each_time_has_one_row_and_the_policys_ones_a_job(
    place: tuple[str, datetime], cron: str, catch_up: str, looks_sec: list[int]
) -> None:
    name, change = place
    begin = change - timedelta(days=1, seconds=30)
    looks = [begin, *(begin + timedelta(seconds=n) for n in sorted(looks_sec))]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        site = Site(sqlite_store(clock), clock, Path(folder))
        schedule = site.schedule(cron, time_zone=name, catch_up=catch_up, catch_up_limit=1000)
        wanted: dict[float, RunState] = {}
        expression = "0 0 * * *" if cron == "@daily" else cron
        for last, look in zip([looks[0], *looks], looks, strict=False):
            minute = last.replace(second=0, microsecond=0)
            times = [
                at
                for at in walk(expression, ZoneInfo(name), minute, look.astimezone(UTC))
                if at > last.timestamp() // 1 + 0.5
            ]
            on_time = bool(times) and look.timestamp() - times[-1] <= 300
            runs = {"all": times, "latest": times[-1:], "none": times[-1:] if on_time else []}
            wanted |= dict.fromkeys(times, RunState.MISSED)
            wanted |= dict.fromkeys(runs[catch_up], RunState.SUBMITTED)
            site.tick(schedule, look.timestamp())
            while jobs := [job for job in site.store.list_jobs(1000) if not job.state.is_final]:
                (job,) = jobs  # one after the other
                site.end(job.job_id)
                site.tick(schedule, look.timestamp())
        assert site.states(schedule) == wanted
        submitted = [at for at, state in wanted.items() if state is RunState.SUBMITTED]
        assert len(site.store.list_jobs(1000)) == len(submitted)
