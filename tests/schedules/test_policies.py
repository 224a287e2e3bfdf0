"""A two-day outage across a change of the clock: every policy does what it says, in every store.

Run 0 is submitted. Then no scheduler checks for two days, and the clock changes on the first. From
noon after the second a scheduler checks every few hours again; run 3 is on time.
"""

from __future__ import annotations

import pytest
from schedules.conftest import Site, at

from specbatch.jobs.schedules.definition import Schedule
from specbatch.schemas.schedules import RunState

# zone, cron, and UTC of run 0, of runs 1 (with the change) and 2, of noon, and of run 3
RUN_TIMES = {
    "skipped hour, Berlin": (
        *("Europe/Berlin", "30 2 * * *", "2026-03-28T01:30Z"),
        *("2026-03-29T01:00Z", "2026-03-30T00:30Z", "2026-03-30T10:00Z", "2026-03-31T00:30Z"),
    ),
    "doubled hour, New York": (
        *("America/New_York", "30 1 * * *", "2026-10-31T05:30Z"),
        *("2026-11-01T05:30Z", "2026-11-02T06:30Z", "2026-11-02T17:00Z", "2026-11-03T06:30Z"),
    ),
    "skipped half hour, Lord Howe": (
        *("Australia/Lord_Howe", "15 2 * * *", "2026-10-02T15:45Z"),
        *("2026-10-03T15:30Z", "2026-10-04T15:15Z", "2026-10-05T01:00Z", "2026-10-05T15:15Z"),
    ),
    "skipped midnight, Cairo": (
        *("Africa/Cairo", "@daily", "2026-04-22T22:00Z"),
        *("2026-04-23T22:00Z", "2026-04-24T21:00Z", "2026-04-25T09:00Z", "2026-04-25T21:00Z"),
    ),
}

# What becomes of runs 1, 2 and 3: missed, submitted, queued or left out (skipped). `x` in front:
# the job that was at work is cancelled. Nothing ends by itself from noon on.
#                          run 0 is over   run 0 is still at work
EXPECTED = {
    ("none", "skip"): ("m m s", "m m l"),
    ("none", "queue"): ("m m s", "m m q"),
    ("none", "cancel-old"): ("m m s", "m m xs"),
    ("latest", "skip"): ("m s l", "m l l"),
    ("latest", "queue"): ("m s q", "m q q"),
    ("latest", "cancel-old"): ("m s xs", "m xs xs"),
    ("all", "skip"): ("s q l", "l l l"),
    ("all", "queue"): ("s q q", "q q q"),
    ("all", "cancel-old"): ("s l xs", "xs l xs"),
}
STATES = {
    "m": RunState.MISSED,
    "s": RunState.SUBMITTED,
    "q": RunState.QUEUED,
    "l": RunState.SKIPPED,
}


def outage(site: Site, schedule: Schedule, run_times: list[float], noon: float, over: bool) -> None:
    """From the day before run 0 until half an hour after run 3."""
    site.tick(schedule, run_times[0] - 7200)
    site.tick(schedule, run_times[0] - 1)
    assert site.states(schedule) == {}
    site.tick(schedule, run_times[0])
    assert site.states(schedule) == {run_times[0]: RunState.SUBMITTED}
    if over:
        site.end(site.job_of(schedule, run_times[0]))
    site.tick(schedule, noon)
    while site.clock.now < run_times[3] - 0.5:
        site.tick(schedule, min(site.clock.now + 25_200, run_times[3] - 0.5))
    site.tick(schedule, run_times[3])
    site.tick(schedule, run_times[3] + 1800)


# Zones are the same to every store; a database has one change of each kind.
PLACES = [("sqlite", change) for change in RUN_TIMES]
PLACES += [("postgres", change) for change in list(RUN_TIMES)[:2]]


@pytest.mark.parametrize(("any_site", "change"), PLACES, indirect=["any_site"])
def test_after_an_outage_across_a_change_policies_do_what_they_say(
    any_site: Site, change: str
) -> None:
    zone, cron, *utc = RUN_TIMES[change]
    *run_times, noon, last = map(at, utc)
    run_times.append(last)
    for (catch_up, overlap), columns in EXPECTED.items():
        for over, column in zip((True, False), columns, strict=True):
            schedule = any_site.schedule(
                cron, f"{catch_up}.{overlap}.{over}",
                time_zone=zone, catch_up=catch_up, overlap=overlap,
            )  # fmt: skip
            outage(any_site, schedule, run_times, noon, over)
            words = column.split()
            wanted = [RunState.SUBMITTED, *(STATES[word[-1]] for word in words)]
            assert any_site.states(schedule) == dict(zip(run_times, wanted, strict=True)), (
                schedule.name
            )
            jobs = {
                run_at: any_site.store.get_job(any_site.job_of(schedule, run_at))
                for run_at, state in zip(run_times, wanted, strict=True)
                if state is RunState.SUBMITTED
            }
            assert len({job.job_id for job in jobs.values()}) == len(jobs)
            assert {n: job.spec["output"]["uri"][-16:-1] for n, job in jobs.items()} == {
                n: f"{utc[i if i < 3 else 4]}".replace("-", "").replace(":", "")[:-1] + "00"
                for i, n in enumerate(run_times)
                if n in jobs
            }
            cancelled = [job.stop_reason for job in jobs.values() if job.cancel_requested]
            assert len(cancelled) == column.count("x")
            assert all(f"schedule {schedule.name}: its run of" in str(why) for why in cancelled)


def test_what_waits_is_submitted_one_after_the_other(site: Site) -> None:
    schedule = site.schedule("30 2 * * *", catch_up="all", catch_up_limit=3, overlap="queue")
    site.tick(schedule, "2026-01-01T00:00Z")
    site.tick(schedule, "2026-01-06T12:00Z")  # five runs later
    run_times = [at(f"2026-01-{day:02}T02:30Z") for day in range(1, 7)]
    missed, waits = RunState.MISSED, RunState.QUEUED
    states = [missed, missed, missed, RunState.SUBMITTED, waits, waits]
    assert site.states(schedule) == dict(zip(run_times, states, strict=True))
    for _ in range(3):
        site.tick(schedule, site.clock.now + 5)  # nothing is over yet
    assert list(site.states(schedule).values()) == states
    for run_at in run_times[3:5]:
        site.end(site.job_of(schedule, run_at))
        site.tick(schedule, site.clock.now + 5)
        states[states.index(waits)] = RunState.SUBMITTED
        assert list(site.states(schedule).values()) == states
    (row,) = site.store.schedule_runs(schedule.name, logical_at=run_times[3])
    assert row.reason == "caught up, 2 days, 9:30:00 late"
    (row,) = site.store.schedule_runs(schedule.name, logical_at=run_times[0])
    assert row.reason == (
        "no scheduler checked it until 2026-01-06T12:00:00Z, and catch_up is all, up to 3"
    )


@pytest.mark.parametrize("catch_up", ["none", "latest", "all"])
@pytest.mark.parametrize("late_sec", [0, 299, 300, 301])
def test_a_little_late_is_on_time(site: Site, catch_up: str, late_sec: int) -> None:
    schedule = site.schedule("30 2 * * *", catch_up=catch_up)
    site.tick(schedule, "2026-01-01T02:00Z")
    run_at = at("2026-01-01T02:30Z")
    site.tick(schedule, run_at + late_sec)
    is_missed = catch_up == "none" and late_sec > 300
    wanted = RunState.MISSED if is_missed else RunState.SUBMITTED
    assert site.states(schedule) == {run_at: wanted}


def test_a_long_outage_of_a_frequent_schedule_is_told_in_bounds(site: Site) -> None:
    schedule = site.schedule("* * * * *", catch_up="none")
    site.tick(schedule, "2026-01-01T00:00Z")
    site.tick(schedule, "2026-01-01T20:00:30Z")
    states = site.states(schedule)
    assert len(states) == 102
    assert next(iter(states)) == at("2026-01-01T00:01Z")
    assert list(states)[1] == at("2026-01-01T18:20Z")
    assert states.pop(at("2026-01-01T20:00Z")) is RunState.SUBMITTED
    assert set(states.values()) == {RunState.MISSED}
    (row,) = site.store.schedule_runs(logical_at=at("2026-01-01T00:01Z"))
    assert str(row.reason).endswith("; 1,098 more missed times after it have no rows")
