"""The whole store in a few numbers, alike on both databases."""

from __future__ import annotations

from contracts.shorthand import claim, ended, found, ingest
from ledger.builders import (
    JOB,
    LEASE_SEC,
    NO_TIME,
    RESULTS,
    Clock,
    completion,
    new_group,
    new_job,
    position,
)

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.audit import AuditRecord, Correctness
from specbatch.schemas.figures import ScheduleRuns, StoreFigures
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.records import JobState, Stage
from specbatch.schemas.schedules import PAUSED, RunState, ScheduleRun
from specbatch.schemas.speculation import AcceptanceCount

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


def test_a_schedule_tells_how_long_its_last_job_took_and_which_were_late(
    store: Store, clock: Clock
) -> None:
    def run(job_id: str, took: float, state: JobState, deadline_sec: float | None) -> None:
        clock.advance(DAY)
        run_of = ScheduleRun("nightly", clock.now, RunState.SUBMITTED, job_id)
        store.note_schedule_run(run_of)
        store.create_job(new_job(job_id, deadline_sec=deadline_sec, output_uri=f"file:///{job_id}"))
        lease = found(store.claim_job(job_id, Stage.INGEST, "w", LEASE_SEC)).lease
        store.finish_ingest(lease, 0, {})
        clock.advance(took)
        lease = found(store.claim_job(job_id, Stage.PUBLISH, "w", LEASE_SEC)).lease
        store.finish_job(lease, state)

    run("jobdone", 50.0, JobState.DONE, None)
    assert store.figures().schedules["nightly"].duration_sec == 50.0
    run("joblate", 70.0, JobState.CANCELLED, 60.0)
    run("jobstopped", 20.0, JobState.CANCELLED, 60.0)  # by somebody
    figures = store.figures().schedules["nightly"]
    assert (figures.late, figures.failed, figures.partial) == (1, 0, 0)
    assert figures.duration_sec == 50.0, "nights that are cut off tell nothing"


def test_jobs_that_will_miss_their_deadline_are_told_by_name(store: Store, clock: Clock) -> None:
    ingest(store, groups=4)  # without a deadline
    store.create_job(new_job("joblimited", deadline_sec=100.0))
    assert store.figures().at_risk == {"nightly": 0}, "nobody knows how long it takes"
    work = found(store.claim_job("joblimited", Stage.INGEST, "w", LEASE_SEC))
    store.add_groups(work.lease, [new_group(0), new_group(1)], [], 8, position(8))
    store.finish_ingest(work.lease, 8, {})
    clock.advance(40.0)
    verify = found(store.claim_group("joblimited", 0, Stage.VERIFY, "w", LEASE_SEC)).lease
    store.advance(verify, Stage.RECORD, RESULTS, NO_TIME)
    record = found(store.claim_group("joblimited", 0, Stage.RECORD, "w", LEASE_SEC)).lease
    store.commit_group(record, [completion(row) for row in range(4)], NO_TIME, {})
    assert store.figures().at_risk == {"nightly": 0}, "half of it took 40 s"
    clock.advance(15.0)
    assert store.figures().at_risk == {"nightly": 1}, "half of it takes 55 s by now"
    store.request_cancel("joblimited")
    assert store.figures().at_risk == {}
    lease = found(store.claim_job("joblimited", Stage.PUBLISH, "w", LEASE_SEC)).lease
    store.finish_job(lease, JobState.CANCELLED)
    store.retry_job("joblimited")
    assert store.figures().at_risk == {"nightly": 0}, "the hours before its retry tell nothing"


def test_a_job_that_has_not_begun_is_expected_to_take_as_long_as_the_last_one(
    store: Store, clock: Clock
) -> None:
    ended(store, "jobbefore", JobState.DONE, output_uri="file:///before")
    store.create_job(new_job("jobquick", name="quick", deadline_sec=50.0))
    store.create_job(new_job("jobslow", deadline_sec=50.0, privacy=PrivacyMode.HASH_ONLY))
    assert store.figures().at_risk == {"quick": 0, None: 0}
    clock.advance(50.1)
    assert store.figures().at_risk == {"quick": 0, None: 1}


def test_a_job_that_was_retried_does_not_tell_how_long_the_next_one_takes(
    store: Store, clock: Clock
) -> None:
    ended(store, "jobbefore", JobState.DONE, output_uri="file:///before")
    clock.advance(1.0)
    ended(store, "jobretried", JobState.CANCELLED, output_uri="file:///retried")
    clock.advance(3600.0)
    store.retry_job("jobretried")
    last = found(store.claim_job("jobretried", Stage.PUBLISH, "w", LEASE_SEC)).lease
    store.finish_job(last, JobState.DONE)
    store.create_job(new_job("jobnext", deadline_sec=1000.0))
    assert store.figures().at_risk == {"nightly": 0}


def test_slow_falls_are_told_of_jobs_that_ran_lately(store: Store, clock: Clock) -> None:
    clock.now = 20_000.5 * DAY
    store.create_job(new_job("jobhidden", name="hidden", privacy=PrivacyMode.HASH_ONLY))
    for night in range(80):
        falling = 7_000.0 * 0.99 ** max(0, night - 55)
        for name, tag, agreed in (
            *(("nightly", None, 7_000.0), ("nightly", "news", falling)),
            *(("hidden", None, falling), ("steady", None, 7_000.0 + night % 3)),
        ):
            counts = [AcceptanceCount("ngram:2", tag, agreed, 10_000.0)]
            store.learn_acceptance("default", name, counts)
        clock.advance(DAY)
    told = store.slow_falls()
    assert told == {("nightly", "ngram"): True, (None, "ngram"): True, ("steady", "ngram"): False}
    store.supersede_acceptance("default", "nightly")
    assert ("nightly", "ngram") not in store.slow_falls()
    clock.advance(3 * DAY)
    assert store.slow_falls() == {}


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
