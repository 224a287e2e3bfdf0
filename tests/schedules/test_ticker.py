"""Once each: through crashes, beside others who look too, with changed files, by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from contracts.shorthand import successes, together
from schedules.conftest import Site, at, silent

from specbatch.jobs.schedules.ticker import key_of
from specbatch.pipeline.runtime.client import Client
from specbatch.schemas.errors import InputError, StoreError, UsageError
from specbatch.schemas.schedules import RunState, ScheduleRun
from specbatch.schemas.spec import JobSpec

RUN_AT = "2026-01-01T02:30Z"
EVE = "2026-01-01T00:00Z"


def test_the_key_is_the_schedule_and_the_logical_time(any_site: Site) -> None:
    schedule = any_site.schedule("30 2 * * *", time_zone="Europe/Berlin")
    any_site.tick(schedule, EVE)
    any_site.tick(schedule, "2026-01-01T01:30Z")
    (job,) = any_site.store.list_jobs()
    assert job.idempotency_key == "schedule:nightly:2026-01-01T01:30:00Z"
    assert job.idempotency_key == key_of("nightly", at("2026-01-01T01:30Z"))
    assert job.name == "nightly"
    assert job.spec["input"]["uri"] == f"{any_site.folder}/in/2026-01-01.jsonl"
    (row,) = any_site.store.schedule_runs("nightly")
    assert (row.job_id, row.state, row.reason) == (job.job_id, RunState.SUBMITTED, None)


def test_what_was_due_before_a_schedule_was_there_is_not_its_business(site: Site) -> None:
    schedule = site.schedule("30 2 * * *", catch_up="all")
    site.tick(schedule, "2026-01-05T12:00Z")
    site.tick(schedule, "2026-01-05T13:00Z")
    assert site.store.schedule_runs() == []
    site.clock.now = at(RUN_AT)
    rows = site.ticker().tick(site.schedule("30 2 * * *", "other"), since=at(RUN_AT) - 300)
    assert [row.state for row in rows] == [RunState.QUEUED, RunState.SUBMITTED]


def test_changing_the_times_misses_none_of_the_new_ones_before(site: Site) -> None:
    schedule = site.schedule("30 2 * * *")
    site.tick(schedule, EVE)
    site.tick(schedule, RUN_AT)
    hourly = site.schedule("0 * * * *", catch_up="all")
    site.tick(hourly, "2026-01-01T14:20Z")
    site.tick(hourly, "2026-01-01T15:00Z")
    assert list(site.states(hourly)) == [at(RUN_AT), at("2026-01-01T15:00Z")]
    site.tick(schedule, "2026-01-03T12:00Z")  # and back
    assert len(site.states(schedule)) == 2
    site.tick(schedule, "2026-01-04T02:30Z")
    assert list(site.states(schedule))[-1] == at("2026-01-04T02:30Z")


def test_other_changes_of_a_file_leave_its_times_as_they_are(site: Site) -> None:
    site.tick(site.schedule("30 2 * * *"), EVE)
    changed = site.schedule("30  2 * * *", catch_up="all", job={"verifier": "models/other"})
    site.tick(changed, "2026-01-02T12:00Z")
    assert list(site.states(changed)) == [at(RUN_AT), at("2026-01-02T02:30Z")]


def test_times_pass_while_a_schedule_is_paused_and_are_not_missed(site: Site) -> None:
    site.tick(site.schedule("30 2 * * *"), EVE)
    paused = site.schedule("30 2 * * *", paused=True)
    site.tick(paused, "2026-01-01T01:00Z")
    site.tick(paused, "2026-01-02T12:00Z")
    assert site.ticker().next_time(paused) is None
    back = site.schedule("30 2 * * *", catch_up="all")
    site.tick(back, "2026-01-03T12:00Z")
    assert site.states(back) == {}
    site.tick(back, "2026-01-04T02:30Z")
    assert list(site.states(back)) == [at("2026-01-04T02:30Z")]


def test_one_scheduler_whose_file_goes_back_and_forth_is_held_to_no_time_between(
    site: Site,
) -> None:
    ticker, nightly = site.ticker(), site.schedule("30 2 * * *")
    hourly = site.schedule("0 * * * *")
    for schedule, when in (
        (nightly, EVE),
        (hourly, "2026-01-01T01:30Z"),
        (nightly, "2026-01-03T12:00Z"),
        (nightly, "2026-01-04T02:30Z"),
    ):
        site.clock.now = at(when)
        ticker.tick(schedule)
    assert list(site.states(nightly)) == [at("2026-01-04T02:30Z")]


# --- others, whose files say otherwise ------------------------------------------------------


def test_schedulers_with_other_copies_of_a_file_run_their_times_and_say_so(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    early, late = site.schedule("30 2 * * *"), site.schedule("30 3 * * *")
    paused = site.schedule("30 2 * * *", paused=True)
    looks = [(site.ticker(), schedule) for schedule in (early, late, paused)]
    times = [f"2026-01-0{day}T0{hour}:30Z" for day in (1, 2) for hour in (1, 2, 3)]
    for when in (EVE, *times):
        site.clock.now = at(when)
        for ticker, schedule in looks:
            ticker.tick(schedule)
            site.clock.now += 1
    assert list(site.states(early)) == [at(when) for when in times if "T01" not in when]
    assert len(site.store.schedule_runs(states={RunState.SEEN})) == 3
    told = [r.getMessage() for r in caplog.records if "the same file" in r.getMessage()]
    assert sorted(told) == [
        f"schedule nightly runs with other times elsewhere, here it is 30 {hour} * * * in UTC: "
        "give all schedulers the same file"
        for hour in (2, 3)
    ]


def test_beside_another_copy_a_look_that_fails_is_made_up_for(site: Site) -> None:
    early, late = site.schedule("30 2 * * *", catch_up="none"), site.schedule("30 3 * * *")
    site.clock.now = at(EVE)
    # Its first word is that it is there, its second what becomes of the run.
    one = site.ticker(store=DyingStore(site.store, 2, after=False))
    one.tick(early)
    site.tick(late, "2026-01-01T00:01Z")
    site.clock.now = at(RUN_AT)
    with pytest.raises(Died):
        one.tick(early)
    site.clock.now = at("2026-01-01T02:50Z")
    one.tick(early)
    assert site.states(early) == {at(RUN_AT): RunState.MISSED}


def test_what_another_one_submits_is_submitted_though_it_cannot_be_here(site: Site) -> None:
    schedule = site.schedule("30 2 * * *")
    site.tick(schedule, EVE)
    site.clock.now = at(RUN_AT)
    slow = SlowClient(site.store, silent, "file:///work")
    slow.meanwhile = lambda: site.ticker(check=no_input).tick(schedule)
    rows = site.ticker(client=slow).tick(schedule)
    assert [row.state for row in rows] == [RunState.QUEUED, RunState.SUBMITTED]
    (job,) = site.store.list_jobs()
    assert site.job_of(schedule, at(RUN_AT)) == job.job_id


def test_a_job_made_of_another_copy_of_the_file_is_the_runs_job(site: Site) -> None:
    theirs = site.schedule("30 2 * * *", job={"verifier": "models/other"})
    site.tick(theirs, EVE)
    site.clock.now = at(RUN_AT)
    with pytest.raises(Died):  # before its second word: that it was submitted
        site.ticker(store=DyingStore(site.store, 2, after=False)).tick(theirs)
    schedule = site.schedule("30 2 * * *")
    site.tick(schedule, "2026-01-01T02:31Z")
    (row,) = site.store.schedule_runs()
    (job,) = site.store.list_jobs()
    assert (row.state, row.job_id) == (RunState.SUBMITTED, job.job_id)
    assert str(row.reason).startswith("submitted otherwise: idempotency key")
    assert "differs in: verifier" in str(row.reason)
    site.tick(schedule, "2026-01-02T02:30Z")  # meets it
    assert site.states(schedule)[at("2026-01-02T02:30Z")] is RunState.QUEUED


# --- crashes and others who look ------------------------------------------------------------


class Died(BaseException):
    """What a killed process leaves behind: nothing after this."""


class DyingStore:
    """A store whose caller dies at its n-th word about a time: before it, or when it is written."""

    def __init__(self, store: Any, calls: int, after: bool) -> None:
        self._store, self._calls, self._after = store, calls, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def note_schedule_run(self, *args: Any, **kwargs: Any) -> Any:
        return self._word(self._store.note_schedule_run, *args, **kwargs)

    def note_schedule_runs(self, *args: Any, **kwargs: Any) -> Any:
        return self._word(self._store.note_schedule_runs, *args, **kwargs)

    def _word(self, note: Any, *args: Any, **kwargs: Any) -> Any:
        self._calls -= 1
        if self._calls == 0 and not self._after:
            raise Died
        done = note(*args, **kwargs)
        if self._calls == 0:
            raise Died
        return done


@pytest.mark.parametrize("overlap", ["skip", "queue", "cancel-old"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_wherever_a_look_dies_the_next_one_goes_on_with_it(
    site: Site, overlap: str, after: bool, call: int
) -> None:
    schedule = site.schedule("30 2 * * *", catch_up="none", overlap=overlap)
    site.tick(schedule, "2025-12-31T00:00Z")
    site.tick(schedule, "2025-12-31T02:30Z")
    site.end(site.job_of(schedule, at("2025-12-31T02:30Z")))
    site.clock.now = at(RUN_AT)
    try:
        site.ticker(store=DyingStore(site.store, call, after)).tick(schedule)
    except Died:
        assert call < 3
    else:
        assert call == 3  # there are two words: that it is to be run, and that it was submitted
    was_known = bool(site.states(schedule).get(at(RUN_AT)))
    site.tick(schedule, "2026-01-01T09:00Z")  # much later
    wanted = RunState.SUBMITTED if was_known else RunState.MISSED
    assert site.states(schedule)[at(RUN_AT)] is wanted
    assert len(site.store.list_jobs()) == 1 + (wanted is RunState.SUBMITTED)


def test_a_look_that_dies_before_it_cancels_is_made_up_for(site: Site) -> None:
    schedule = site.schedule("30 2 * * *", overlap="cancel-old")
    site.tick(schedule, EVE)
    site.tick(schedule, RUN_AT)
    site.clock.now = at("2026-01-02T02:30Z")
    with pytest.raises(Died):  # after its first word: that the run is due
        site.ticker(store=DyingStore(site.store, 1, after=True)).tick(schedule)
    site.tick(schedule, "2026-01-02T02:31Z")
    assert set(site.states(schedule).values()) == {RunState.SUBMITTED}
    older = site.store.get_job(site.job_of(schedule, at(RUN_AT)))
    newer = site.store.get_job(site.job_of(schedule, at("2026-01-02T02:30Z")))
    assert (older.cancel_requested, newer.cancel_requested) == (True, False)
    assert older.stop_reason == "schedule nightly: its run of 2026-01-02T02:30:00Z was due"


def test_what_waited_and_is_submitted_amid_a_look_is_cancelled_too(site: Site) -> None:
    class Amid:
        """A store in which a second before the word on times what waits is submitted."""

        def __getattr__(self, name: str) -> Any:
            return getattr(site.store, name)

        def note_schedule_runs(self, *args: Any) -> Any:
            site.tick(schedule, newer - 1)
            site.clock.now = newer
            return site.store.note_schedule_runs(*args)

    schedule = site.schedule("30 2 * * *", overlap="cancel-old")
    newer = at("2026-01-02T02:30Z")
    site.tick(schedule, EVE)
    site.store.note_schedule_run(ScheduleRun("nightly", at(RUN_AT), RunState.QUEUED))
    site.clock.now = newer
    site.ticker(store=Amid()).tick(schedule)
    assert set(site.states(schedule).values()) == {RunState.SUBMITTED}
    cancelled = [job.job_id for job in site.store.list_jobs() if job.cancel_requested]
    assert cancelled == [site.job_of(schedule, at(RUN_AT))]


@pytest.mark.parametrize("overlap", ["skip", "queue", "cancel-old"])
@pytest.mark.parametrize("catch_up", ["latest", "all"])
def test_schedulers_at_once_submit_once(any_site: Site, catch_up: str, overlap: str) -> None:
    schedule = any_site.schedule("30 2 * * *", catch_up=catch_up, overlap=overlap)
    any_site.tick(schedule, EVE)
    run_times = [at(f"2026-01-0{day}T02:30Z") for day in range(1, 5)]
    for look, run_at in enumerate(run_times[1::2]):  # two outages of a day each
        any_site.clock.now = run_at + 60
        tickers = [any_site.ticker() for _ in range(4)]
        successes(together(*[partial(ticker.tick, schedule) for ticker in tickers]))
        runs = any_site.store.schedule_runs(schedule.name)
        submitted = [run.job_id for run in runs if run.state is RunState.SUBMITTED]
        assert len(set(submitted)) == len(submitted) == len(any_site.store.list_jobs())
        assert len(runs) == 2 * (look + 1)
        if not look:  # nothing was at work before: as one of them alone would have done
            others = {"latest": RunState.MISSED, "all": RunState.SUBMITTED}
            waits = {"latest": RunState.SUBMITTED, "all": RunState.QUEUED}
            assert [run.state for run in runs] == [waits[catch_up], others[catch_up]]
    for job in any_site.store.list_jobs():
        if not job.cancel_requested:
            any_site.end(job.job_id)


class SlowClient(Client):
    """Between its look at the store and its submission others get on."""

    meanwhile: Any

    def submit(self, spec: JobSpec, idempotency_key: str | None = None) -> Any:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return super().submit(spec, idempotency_key)


def test_a_late_submission_of_what_was_skipped_meanwhile_is_taken_back(site: Site) -> None:
    schedule = site.schedule("30 2 * * *", overlap="cancel-old")
    site.tick(schedule, EVE)
    site.clock.now = at(RUN_AT)
    slow = SlowClient(site.store, silent, "file:///work")
    slow.meanwhile = lambda: site.tick(schedule, "2026-01-02T02:30Z")
    site.ticker(client=slow).tick(schedule)
    states = [RunState.SKIPPED, RunState.SUBMITTED]
    assert list(site.states(schedule).values()) == states
    newer, older = sorted(site.store.list_jobs(), key=lambda job: job.cancel_requested)
    assert newer.job_id == site.job_of(schedule, at("2026-01-02T02:30Z"))
    assert (newer.cancel_requested, older.cancel_requested) == (False, True)
    assert "the run of 2026-01-02T02:30:00Z took its place" in str(older.stop_reason)


# --- what cannot be submitted ---------------------------------------------------------------


def no_input(spec: JobSpec) -> None:
    raise InputError(f"input {spec.input.uri} does not exist or is empty")


def test_a_job_that_cannot_be_is_noted_with_the_reason(site: Site) -> None:
    schedule = site.schedule("30 2 * * *")
    site.tick(schedule, EVE)
    site.clock.now = at(RUN_AT)
    site.ticker(check=no_input).tick(schedule)
    (row,) = site.store.schedule_runs()
    assert row.state is RunState.FAILED
    assert row.reason == f"input {site.folder}/in/2026-01-01.jsonl does not exist or is empty"
    assert site.store.list_jobs() == []
    site.tick(schedule, "2026-01-01T02:35Z")  # the input came late: that is for somebody to say
    assert site.store.list_jobs() == []
    (row,) = site.ticker().run_at(schedule, at(RUN_AT))
    assert (row.state, row.reason) == (RunState.SUBMITTED, "asked for by hand")


def test_while_the_store_refuses_a_job_waits(site: Site) -> None:
    class Refusing(Client):
        def submit(self, *_: Any, **__: Any) -> Any:
            raise StoreError("the database is out of reach")

    schedule = site.schedule("30 2 * * *", catch_up="none")
    site.tick(schedule, EVE)
    site.clock.now = at(RUN_AT)
    site.ticker(client=Refusing(site.store, silent, "file:///w")).tick(schedule)
    assert site.states(schedule) == {at(RUN_AT): RunState.QUEUED}
    site.tick(schedule, "2026-01-01T09:00Z")
    assert site.states(schedule) == {at(RUN_AT): RunState.SUBMITTED}


# --- by hand --------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", ["skip", "queue", "cancel-old"])
def test_one_time_is_submitted_by_hand_and_once(any_site: Site, overlap: str) -> None:
    schedule = any_site.schedule("30 2 * * *", catch_up="none", overlap=overlap)
    any_site.tick(schedule, EVE)
    any_site.tick(schedule, "2026-01-03T12:00Z")
    assert set(any_site.states(schedule).values()) == {RunState.MISSED}
    for run_at in ("2026-01-02T02:30Z", RUN_AT, "2025-11-11T02:30Z"):  # whatever is at work
        (row,) = any_site.ticker().run_at(schedule, at(run_at))
        (again,) = any_site.ticker().run_at(schedule, at(run_at))
        assert row.state is again.state is RunState.SUBMITTED
        assert row.job_id == again.job_id == any_site.job_of(schedule, at(run_at))
    assert len(any_site.store.list_jobs()) == 3
    assert not any(job.cancel_requested for job in any_site.store.list_jobs())


def test_a_run_by_hand_of_an_old_time_is_met_by_the_next_one(site: Site) -> None:
    schedule = site.schedule("0 * * * *", overlap="skip")
    site.tick(schedule, at(EVE) - 60)
    hours = [at(EVE) + 3600 * n for n in range(25)]
    for hour in hours[:24]:
        site.tick(schedule, hour)
        site.end(site.job_of(schedule, hour))
        site.clock.now += 600
    (row,) = site.ticker().run_at(schedule, at("2025-11-11T02:00Z"))
    site.tick(schedule, hours[24])
    (met,) = site.store.schedule_runs(limit=1)
    assert (met.state, met.reason) == (
        RunState.SKIPPED,
        f"job {row.job_id} of 2025-11-11T02:00:00Z was still running",
    )


def test_by_hand_other_times_that_are_due_are_seen_to_first(site: Site) -> None:
    schedule = site.schedule("30 2 * * *", catch_up="none")
    site.tick(schedule, EVE)
    site.clock.now = at("2026-01-03T12:00Z")
    rows = site.ticker().run_at(schedule, at("2026-01-03T02:30Z"))
    states = [RunState.MISSED, RunState.MISSED, RunState.SUBMITTED]
    assert [row.state for row in rows] == states
    assert list(site.states(schedule).values()) == states


def test_what_is_no_time_or_is_to_come_is_not_submitted(site: Site) -> None:
    schedule = site.schedule("30 2 * * *", time_zone="Europe/Berlin")
    site.clock.now = at("2026-01-02T12:00Z")
    with pytest.raises(UsageError, match=r"next one after it is 2026-01-02T02:30:00\+01:00"):
        site.ticker().run_at(schedule, at("2026-01-01T02:30Z"))
    with pytest.raises(UsageError, match="still to come"):
        site.ticker().run_at(schedule, at("2026-01-03T01:30Z"))
    assert site.store.list_jobs() == []
