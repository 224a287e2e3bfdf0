"""Jobs that end before their time, on both databases: cancel, deadline, budget; what is kept of
them; and inputs that wait until fewer groups are open."""

from __future__ import annotations

from dataclasses import replace

import pytest
from contracts.shorthand import (
    claim,
    claim_job,
    commit,
    exhaust,
    finish,
    found,
    ingest,
    stage_of,
    verified,
)
from ledger.builders import (
    JOB,
    LEASE_SEC,
    NO_TIME,
    RESULTS,
    START,
    Clock,
    completion,
    new_group,
    new_job,
    position,
)

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import FencedError
from specbatch.schemas.records import DueWork, JobState, Lease, Stage, StageTiming

OTHER = "job00000000000002"


# --- cancel, deadline, budget ---------------------------------------------------------------


def test_the_first_reason_to_stop_stays_until_the_job_is_retried(store: Store) -> None:
    ingest(store, groups=1)
    assert store.request_cancel(JOB, "cancelled by alice").stop_reason == "cancelled by alice"
    assert store.request_cancel(JOB, "cancelled by bob").stop_reason == "cancelled by alice"
    finish(store, JobState.CANCELLED)
    store.retry_job(JOB)
    assert store.get_job(JOB).stop_reason is None


def test_a_job_whose_deadline_passes_is_stopped(store: Store, clock: Clock) -> None:
    ingest(store, deadline_sec=100.0)
    held = claim(store, 0).lease
    assert store.get_job(JOB).deadline_at == START + 100
    clock.advance(99)
    assert store.stop_overdue() == store.cancelled_jobs({held: 0.0}) == set()
    clock.advance(1)
    assert store.stop_overdue() == {JOB}
    job = store.get_job(JOB)
    assert job.cancel_requested
    assert job.stop_reason == "its deadline of 1970-01-12 13:48:20 UTC passed"
    assert store.cancelled_jobs({held: 0.0}) == {JOB}
    assert store.stop_overdue() == set(), "it stops already"


def test_whoever_looks_stops_a_job_that_is_late(store: Store, clock: Clock) -> None:
    ingest(store, deadline_sec=100.0)
    held = claim(store, 0).lease
    clock.advance(100)
    assert store.cancelled_jobs({held: 0.0}) == {JOB}
    assert "deadline" in (store.get_job(JOB).stop_reason or "")


def test_looking_tells_of_the_jobs_that_were_asked_for_and_extends_nothing(
    store: Store, clock: Clock
) -> None:
    ingest(store, groups=1)
    store.create_job(new_job(OTHER))
    reading = found(store.claim_job(OTHER, Stage.INGEST, "i", LEASE_SEC)).lease
    held = claim(store, 0).lease
    assert store.cancelled_jobs({}) == set()
    store.request_cancel(OTHER)
    assert store.cancelled_jobs({held: 0.0}) == set()
    assert store.cancelled_jobs({held: 0.0, reading: 0.0}) == {OTHER}
    clock.advance(LEASE_SEC)
    store.cancelled_jobs({held: 0.0})
    assert DueWork(JOB, Stage.VERIFY, 0, "big") in store.due()


def test_a_budget_counts_what_got_on_and_what_is_in_flight(store: Store, clock: Clock) -> None:
    ingest(store, groups=3, budget_usd=1.0)
    first, second, third = (claim(store, index).lease for index in range(3))
    store.advance(first, Stage.RECORD, RESULTS, StageTiming(1.0, 0.5))
    assert store.cancelled_jobs({second: 0.2, third: 0.2}) == set()
    assert store.stop_overdue() == set()
    assert store.cancelled_jobs({second: 0.3, third: 0.2}) == {JOB}
    assert store.get_job(JOB).stop_reason == "its budget of $1 was spent"
    del clock


def test_what_was_in_flight_counts_no_more_once_it_is_not_held(store: Store) -> None:
    ingest(store, groups=2, budget_usd=1.0)
    first, second = claim(store, 0).lease, claim(store, 1).lease
    assert store.cancelled_jobs({first: 0.7, second: 0.2}) == set()
    store.advance(first, Stage.RECORD, RESULTS, StageTiming(1.0, 0.75))
    assert store.stop_overdue() == set(), "0.75 and 0.2, and not 0.7 once more"
    claim(store, 0, Stage.RECORD)
    assert store.stop_overdue() == set(), "nor while it is recorded"
    store.release(second, "stopped", forgiven=True)
    assert store.stop_overdue() == set()
    assert store.cancelled_jobs({claim(store, 1).lease: 0.25}) == {JOB}


def test_a_lost_lease_spends_nothing(store: Store, clock: Clock) -> None:
    ingest(store, groups=1, budget_usd=1.0)
    old = claim(store, 0).lease
    clock.advance(LEASE_SEC)
    new = claim(store, 0, owner="w2").lease
    assert store.cancelled_jobs({old: 9.0}) == set()
    assert store.cancelled_jobs({new: 0.5}) == set()
    assert store.cancelled_jobs({new: 1.0}) == {JOB}


def test_a_retry_lifts_the_limits_that_were_reached_and_no_others(
    store: Store, clock: Clock
) -> None:
    ingest(store, groups=1, deadline_sec=100.0, budget_usd=1.0)
    lease = claim(store, 0).lease
    assert store.cancelled_jobs({lease: 2.0}) == {JOB}
    store.cancel_group(lease)
    finish(store, JobState.CANCELLED)
    store.retry_job(JOB)
    job = store.get_job(JOB)
    assert (job.budget_usd, job.deadline_at) == (None, START + 100)
    clock.advance(100)
    assert store.stop_overdue() == {JOB}
    finish(store, JobState.CANCELLED)
    store.retry_job(JOB)
    assert store.get_job(JOB).deadline_at is None
    assert store.stop_overdue() == set()


def test_a_job_that_has_ended_is_not_stopped(store: Store, clock: Clock) -> None:
    ingest(store, groups=1, deadline_sec=10.0)
    commit(store, verified(store, 0))
    clock.advance(10)
    assert store.stop_overdue() == set(), "only its output is to be written"
    finish(store)
    assert store.stop_overdue() == set()
    assert store.get_job(JOB).stop_reason is None


# --- what is kept ---------------------------------------------------------------------------


def stopped(store: Store, rows: tuple[int, ...], **report: float) -> Lease:
    """The job is cancelled while group 0 is verified, and these of its rows are kept."""
    lease = claim(store, 0).lease
    store.request_cancel(JOB)
    store.keep_part(lease, [completion(r) for r in rows], StageTiming(2.0, 0.25), report)
    return lease


def test_finished_rows_of_a_stopped_group_are_kept_and_counted(store: Store) -> None:
    ingest(store, groups=1)
    lease = stopped(store, (0, 2), compute_sec=2.0)
    assert stage_of(store) is Stage.PUBLISH
    assert [c.row_index for c in store.completions(JOB)] == [0, 2]
    assert [(i, word) for i, word, _, _ in store.failed_groups(JOB)] == [(0, "cancelled")]
    assert store.kept_rows(JOB) == store.kept_rows(JOB, 0) == {0, 2}
    assert store.kept_rows(JOB, 1) == store.kept_rows("nosuchjob") == set()
    progress = store.progress(JOB)
    assert (progress.rows_done, progress.completions, progress.groups_done) == (2, 2, 0)
    assert (progress.completion_tokens, progress.cost_usd, progress.compute_sec) == (6, 0.5, 2.0)
    assert store.get_job(JOB).report == {"compute_sec": 2.0}
    with pytest.raises(FencedError):
        store.keep_part(lease, [completion(1)], NO_TIME, {})
    assert store.progress(JOB).completions == 2


def test_a_late_holder_keeps_nothing(store: Store, clock: Clock) -> None:
    ingest(store, groups=1)
    lease = claim(store, 0).lease
    clock.advance(LEASE_SEC)
    claim(store, 0, owner="w2")
    with pytest.raises(FencedError):
        store.keep_part(lease, [completion(0)], NO_TIME, {})
    assert list(store.completions(JOB)) == []


def test_after_a_retry_only_the_other_rows_are_to_be_done(store: Store) -> None:
    ingest(store, groups=2)
    stopped(store, (0, 2))
    finish(store, JobState.CANCELLED)
    assert store.retry_job(JOB) == 2
    work = claim(store, 0)
    assert (work.rows, work.rows_kept) == (4, 2)
    assert claim(store, 1).rows_kept == 0
    store.advance(work.lease, Stage.RECORD, RESULTS, NO_TIME)
    lease = claim(store, 0, Stage.RECORD).lease
    store.commit_group(lease, [completion(1), completion(3)], NO_TIME, {})
    progress = store.progress(JOB)
    assert (progress.rows_done, progress.completions, progress.completion_tokens) == (4, 4, 12)
    assert store.kept_rows(JOB, 0) == {0, 1, 2, 3}, "all of the group is finished"


def test_a_job_stopped_twice_keeps_what_both_times_finished(store: Store) -> None:
    ingest(store, groups=1)
    stopped(store, (0,))
    finish(store, JobState.CANCELLED)
    store.retry_job(JOB)
    stopped(store, (3,))
    assert store.kept_rows(JOB) == {0, 3}
    assert (store.progress(JOB).rows_done, store.progress(JOB).completions) == (2, 2)


def test_a_group_with_nothing_finished_ends_all_the_same(store: Store) -> None:
    ingest(store, groups=1)
    stopped(store, ())
    assert stage_of(store) is Stage.PUBLISH
    assert store.kept_rows(JOB) == set()
    assert claim_job(store, Stage.PUBLISH).next_row == 4


# --- reading waits --------------------------------------------------------------------------


def reading(store: Store, groups: int, most_open: int) -> int:
    """Ingest of so many groups, and what it is told then."""
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    store.add_groups(lease, [new_group(i) for i in range(groups)], [], groups * 4, position())
    return store.pause_ingest(lease, most_open)


def test_an_input_is_read_on_while_few_groups_are_open(store: Store) -> None:
    assert reading(store, groups=5, most_open=8) == 3
    assert not store.get_job(JOB).paused
    assert stage_of(store) is Stage.INGEST


def test_an_input_waits_until_half_of_the_groups_are_done(store: Store) -> None:
    assert reading(store, groups=8, most_open=8) == 0
    job = store.get_job(JOB)
    assert (job.paused, job.stage, job.state) == (True, Stage.INGEST, JobState.RUNNING)
    due = []
    for index in range(8):
        assert (store.claim_job(JOB, Stage.INGEST, "i", LEASE_SEC) is None) == (index < 4)
        if index == 4:
            break
        assert DueWork(JOB, Stage.INGEST, None) not in store.due()
        due.append(store.commit_group(verified(store, index), [], NO_TIME, {}))
    assert due == [None, None, None, Stage.INGEST], "whoever ends the last of them enqueues it"
    assert not store.get_job(JOB).paused


def test_a_reading_that_goes_on_does_so_at_its_cursor(store: Store) -> None:
    reading(store, groups=2, most_open=2)
    commit(store, verified(store, 0))
    assert DueWork(JOB, Stage.INGEST, None) in store.due()
    work = claim_job(store, Stage.INGEST)
    assert (work.next_group, work.next_row, work.cursor) == (2, 8, position())
    assert work.lease.attempt == 1
    store.finish_ingest(work.lease, 8, {})
    commit(store, verified(store, 1))
    assert stage_of(store) is Stage.PUBLISH


def test_groups_that_fail_make_room_too(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    store.add_groups(lease, [new_group(i, rows=1) for i in range(2)], [], 2, position())
    assert store.pause_ingest(lease, 2) == 0
    exhaust(store, 0)
    assert not store.get_job(JOB).paused


def test_a_paused_job_can_be_cancelled(store: Store) -> None:
    reading(store, groups=2, most_open=2)
    assert store.request_cancel(JOB).stage is Stage.PUBLISH
    assert not store.get_job(JOB).paused
    assert not store.progress(JOB).ingest_done


def test_who_is_to_stop_does_not_pause(store: Store) -> None:
    """Else nobody would leave the input."""
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    store.add_groups(lease, [new_group(0)], [], 4, position())
    claim(store, 0)
    store.request_cancel(JOB)
    assert store.pause_ingest(lease, 1) == 1
    store.release(lease, "stopped")
    assert stage_of(store) is Stage.RUN


def test_only_who_holds_the_input_can_pause_it(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    with pytest.raises(FencedError):
        store.pause_ingest(replace(lease, token=9), 1)


def test_messages_carry_the_class_of_their_job(store: Store) -> None:
    store.create_job(new_job(priority=0))
    assert store.due() == [DueWork(JOB, Stage.INGEST, None, priority=0)]
    lease = claim_job(store, Stage.INGEST).lease
    store.add_groups(lease, [new_group(0)], [], 4, position())
    assert store.due() == [DueWork(JOB, Stage.VERIFY, 0, "big", 0)]
