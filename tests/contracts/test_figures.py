"""The whole store in a few numbers, alike on both databases."""

from __future__ import annotations

from contracts.shorthand import claim, ended, ingest
from ledger.builders import JOB, LEASE_SEC, Clock

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.audit import AuditRecord, Correctness
from specbatch.schemas.figures import ScheduleRuns, StoreFigures
from specbatch.schemas.records import JobState
from specbatch.schemas.schedules import PAUSED, RunState, ScheduleRun

DAY = 86_400.0


def test_an_empty_store_has_nothing(store: Store) -> None:
    assert store.figures() == StoreFigures(store.backlog())


def test_audits_count_for_thirty_days(store: Store, clock: Clock) -> None:
    ingest(store)
    store.keep_audit(AuditRecord(JOB, sampled=10, differing=1, tokens=70, intact=True))
    clock.advance(20 * DAY)
    store.keep_audit(AuditRecord(JOB, sampled=5, differing=0, tokens=30, intact=True))
    assert store.figures().audited == Correctness(15, 1)
    clock.advance(15 * DAY)
    assert store.figures().audited == Correctness(5, 0)


def test_schedules_tell_their_last_run_and_what_they_lost_lately(
    store: Store, clock: Clock
) -> None:
    def note(schedule: str, days_ago: float, state: RunState) -> None:
        store.note_schedule_run(ScheduleRun(schedule, clock.now - days_ago * DAY, state))

    note("nightly", 3, RunState.SUBMITTED)
    clock.advance(100.0)
    note("nightly", 2, RunState.SUBMITTED)
    last = clock.now
    clock.advance(100.0)
    note("nightly", 1, RunState.MISSED)
    note("nightly", 5, RunState.FAILED)
    note("nightly", 9, RunState.MISSED)  # too long ago
    note("nightly", 4, RunState.SKIPPED)  # as its policy says
    note("hourly", 1, RunState.MISSED)
    note("new", 1, RunState.SEEN)
    assert store.figures().schedules == {
        "nightly": ScheduleRuns(last, 2),
        "hourly": ScheduleRuns(None, 1),
        "new": ScheduleRuns(None, 0),  # looked after: its first loss will be a rise
    }


def test_runs_whose_jobs_failed_or_lack_rows_are_counted(store: Store, clock: Clock) -> None:
    def run(job_id: str, state: JobState) -> None:
        at = clock.now - 20 * DAY + len(job_id)  # late runs of old nights
        store.note_schedule_run(ScheduleRun("nightly", at, RunState.SUBMITTED, job_id))
        ended(store, job_id, state, output_uri=f"file:///{job_id}")

    run("zero", JobState.FAILED)
    clock.advance(8 * DAY)  # which is too long ago
    run("one", JobState.FAILED)
    clock.advance(1.0)
    run("two", JobState.PARTIAL)
    clock.advance(1.0)
    run("three", JobState.DONE)
    found = store.figures().schedules["nightly"]
    assert (found.failed, found.partial) == (1, 1)


def test_a_schedule_that_is_paused_or_gone_is_not_silent(store: Store, clock: Clock) -> None:
    def note(schedule: str, days_ago: float, state: RunState, reason: str | None = "daily") -> None:
        at = clock.now - days_ago * DAY
        assert store.note_schedule_run(ScheduleRun(schedule, at, state, reason=reason))

    for schedule in ("gone", "paused", "lossy", "back"):
        note(schedule, 9, RunState.SEEN)
        note(schedule, 2, RunState.SUBMITTED, None)
    for schedule in ("paused", "lossy", "back"):
        note(schedule, 0.5, RunState.SEEN, PAUSED)
    note("lossy", 1, RunState.MISSED)
    note("back", 0.1, RunState.SEEN)
    submitted = clock.now
    assert store.figures().schedules == {
        "gone": ScheduleRuns(submitted, 0),
        "lossy": ScheduleRuns(None, 1),
        "back": ScheduleRuns(submitted, 0),
    }
    clock.advance(35 * DAY)
    assert store.figures().schedules["gone"] == ScheduleRuns(submitted, 0)
    clock.advance(1)
    assert store.figures().schedules == {
        "gone": ScheduleRuns(None, 0),
        "back": ScheduleRuns(None, 0),
    }


def test_a_claim_tells_how_long_the_group_waited(store: Store, clock: Clock) -> None:
    ingest(store)
    clock.advance(7.0)
    assert claim(store, 0).waited_sec == 7.0
    clock.advance(LEASE_SEC + 2.0)
    assert claim(store, 0, owner="w2").waited_sec == 2.0
