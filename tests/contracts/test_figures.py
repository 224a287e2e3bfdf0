"""The whole store in a few numbers, alike in all stores."""

from __future__ import annotations

import uuid

from contracts.shorthand import claim, claim_job, commit, exhaust, finish, ingest, verified
from ledger.builders import JOB, LEASE_SEC, Clock, completion, new_group, new_job, position

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.audit import AuditRecord, Correctness
from specbatch.schemas.figures import OpenUnits, ScheduleRuns, StoreFigures
from specbatch.schemas.records import FinishReason, JobState, RejectedRow, Stage, StageTiming
from specbatch.schemas.schedules import RunState, ScheduleRun
from specbatch.schemas.timekeeping import Device, NewSession, SessionTime

DAY = 86_400.0


def test_an_empty_store_has_nothing(store: Store) -> None:
    assert store.figures() == StoreFigures()


def test_units_are_ready_leased_or_stuck(store: Store, clock: Clock) -> None:
    ingest(store, groups=3)
    clock.advance(10.0)
    claim(store, 0)
    assert store.figures().units == {Stage.VERIFY: OpenUnits(2, 1, 0, 10.0)}
    clock.advance(LEASE_SEC + 5.0)  # group 0's lease is over by 5 s
    assert store.figures().units == {Stage.VERIFY: OpenUnits(3, 0, 1, 75.0)}
    claim(store, 1)
    claim(store, 2)
    assert store.figures().units == {Stage.VERIFY: OpenUnits(1, 2, 1, 5.0)}


def test_jobs_to_be_read_or_published_are_units_too(store: Store, clock: Clock) -> None:
    store.create_job(new_job())
    clock.advance(3.0)
    assert store.figures().units == {Stage.INGEST: OpenUnits(1, 0, 0, 3.0)}
    assert store.figures().jobs == {JobState.QUEUED: 1}
    lease = claim_job(store, Stage.INGEST).lease
    assert store.figures().units == {Stage.INGEST: OpenUnits(0, 1, 0, 0.0)}
    store.add_groups(lease, [new_group(0)], [], 4, position(4))
    assert store.pause_ingest(lease, 1) == 0
    assert store.figures().units == {Stage.VERIFY: OpenUnits(1, 0, 0, 0.0)}, "it waits for others"
    assert store.figures().jobs == {JobState.RUNNING: 1}


def test_a_job_that_is_over_is_in_no_figure(store: Store) -> None:
    ingest(store, groups=1)
    commit(store, verified(store, 0))
    assert store.figures().units == {Stage.PUBLISH: OpenUnits(1, 0, 0, 0.0)}
    assert store.figures().jobs == {JobState.RUNNING: 1}
    finish(store)
    assert store.figures() == StoreFigures()


def test_failed_rows_of_live_jobs_are_counted(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    rejected = [RejectedRow(4, "r", "empty_prompt", "the prompt is empty")]
    store.add_groups(lease, [new_group(0), new_group(1)], rejected, 9, position(9))
    store.finish_ingest(lease, 9, {})
    assert store.figures().rows_failed == 1
    done = [completion(row, finish_reason=FinishReason.ERROR) for row in (0, 1)]
    store.commit_group(verified(store, 0), done, StageTiming(0.0, 0.0), {})
    assert store.figures().rows_failed == 3
    exhaust(store, 1)
    assert store.figures().rows_failed == store.progress(JOB).rows_failed == 7
    finish(store, JobState.PARTIAL)
    assert store.figures().rows_failed == 0


def test_devices_count_while_their_sessions_go_on(store: Store) -> None:
    def begin(kind: str) -> str:
        session_id = uuid.uuid4().hex
        store.begin_session(NewSession(session_id, "w1", Device(kind, "local", "spot", 5), 0))
        return session_id

    first = begin("cpu")
    begin("cpu")
    begin("h200")
    assert store.figures().workers == {"cpu": 2, "h200": 1}
    store.end_session(SessionTime(first, 10), {})
    assert store.figures().workers == {"cpu": 1, "h200": 1}


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
    }


def test_a_claim_tells_how_long_the_group_waited(store: Store, clock: Clock) -> None:
    ingest(store)
    clock.advance(7.0)
    assert claim(store, 0).waited_sec == 7.0
    clock.advance(LEASE_SEC + 2.0)
    assert claim(store, 0, owner="w2").waited_sec == 2.0
