"""A clock that was far ahead once: what it noted counts when its time has come, and not before."""

from __future__ import annotations

import pytest
from schedules.conftest import Site, at

from specbatch.jobs.schedules.listing import standing
from specbatch.schemas.schedules import RunState, ScheduleRun

SUBMITTED = RunState.SUBMITTED


@pytest.mark.parametrize("stays", [True, False], ids=["one scheduler", "a timer"])
def test_after_a_look_from_the_future_the_next_nights_are_run(any_site: Site, stays: bool) -> None:
    schedule, one = any_site.schedule("30 2 * * *", catch_up="all"), any_site.ticker()

    def look(when: str) -> None:
        any_site.clock.now = at(when)
        (one if stays else any_site.ticker()).tick(schedule)
        for job in any_site.store.list_jobs():
            if not job.state.is_final:
                any_site.end(job.job_id)

    look("2026-01-01T00:00Z")
    look("2026-01-01T02:30Z")
    look("2036-01-01T00:00Z")
    for run_at in ("2026-01-02", "2026-01-03", "2026-01-04"):
        look(f"{run_at}T02:30Z")
    states = any_site.states(schedule)
    assert states[at("2026-01-01T02:30Z")] is SUBMITTED
    assert states[at("2026-01-02T02:30Z")] is RunState.MISSED, "as that look had it"
    assert states[at("2026-01-03T02:30Z")] is states[at("2026-01-04T02:30Z")] is SUBMITTED


def test_what_is_to_come_hides_no_silence(any_site: Site) -> None:
    schedule = any_site.schedule("30 2 * * *")
    for when in ("2026-01-01T00:00Z", "2036-01-01T00:00Z"):
        any_site.tick(schedule, when)
    assert standing(schedule, any_site.store, at("2026-01-02T02:00Z")).lost == 1
    now = at("2026-01-05T00:00Z")
    found = standing(schedule, any_site.store, now)
    assert found.overdue_since == at("2026-01-02T02:30Z")
    assert not found.is_well


def test_a_schedule_first_seen_in_the_future_begins_now(site: Site) -> None:
    schedule = site.schedule("30 2 * * *")
    for when in ("2036-01-01T00:00Z", "2026-01-01T00:00Z", "2026-01-01T02:30Z"):
        site.tick(schedule, when)
    assert site.states(schedule) == {at("2026-01-01T02:30Z"): SUBMITTED}


@pytest.mark.parametrize("overlap", ["queue", "skip", "cancel-old"])
def test_a_night_from_the_future_is_not_run_before_its_time(any_site: Site, overlap: str) -> None:
    schedule = any_site.schedule("30 2 * * *", overlap=overlap)
    run_times = [at(f"2026-01-0{day}T02:30Z") for day in (1, 2, 3)]
    any_site.tick(schedule, "2026-01-01T00:00Z")
    any_site.tick(schedule, run_times[0])
    any_site.store.note_schedule_run(ScheduleRun(schedule.name, run_times[2], RunState.QUEUED))
    any_site.tick(schedule, "2026-01-01T10:00Z")
    first = any_site.job_of(schedule, run_times[0])
    assert not any_site.store.get_job(first).cancel_requested
    any_site.end(first)
    any_site.tick(schedule, "2026-01-01T10:10Z")
    assert any_site.states(schedule)[run_times[2]] is RunState.QUEUED
    any_site.tick(schedule, run_times[1])
    any_site.end(any_site.job_of(schedule, run_times[1]))
    any_site.tick(schedule, run_times[2])
    assert any_site.states(schedule)[run_times[2]] is SUBMITTED
