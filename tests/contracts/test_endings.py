"""How jobs end, and begin again: one test body for both databases."""

from __future__ import annotations

import pytest
from contracts.shorthand import (
    claim,
    claim_job,
    commit,
    exhaust,
    finish,
    ingest,
    stage_of,
    verified,
)
from ledger.builders import (
    DRAFTS,
    JOB,
    LEASE_SEC,
    NO_TIME,
    RESULTS,
    START,
    Clock,
    new_group,
    new_job,
    position,
)

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import (
    FencedError,
    UsageError,
)
from specbatch.schemas.records import (
    DueWork,
    JobState,
    Lease,
    Stage,
)

# --- given up -------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED])
def test_a_job_that_is_given_up_ends_whatever_its_groups_are_at(
    store: Store, state: JobState
) -> None:
    """Also with results that wait to be recorded, and a holder who died or lives on."""
    ingest(store, groups=3)
    commit(store, verified(store, 0))
    waiting = claim(store, 1).lease
    store.advance(waiting, Stage.RECORD, RESULTS, NO_TIME)
    held = claim(store, 2).lease
    assert store.give_up_job(JOB, state, "its model is not served")
    job = store.get_job(JOB)
    assert (job.state, job.stage) == (state, Stage.END)
    assert (job.error, job.finished_at) == ("its model is not served", START)
    assert store.progress(JOB).groups_done == 1
    with pytest.raises(FencedError):
        store.advance(held, Stage.RECORD, RESULTS, NO_TIME)
    assert not store.give_up_job(JOB, JobState.CANCELLED)
    assert store.get_job(JOB) == job
    assert store.retry_job(JOB) == 2
    assert store.claim_group(JOB, 1, Stage.RECORD, "w2", LEASE_SEC), "its results are kept"


# --- publish --------------------------------------------------------------------------------


def test_a_published_job_is_final(store: Store, clock: Clock) -> None:
    ingest(store, groups=1)
    commit(store, verified(store, 0))
    clock.advance(9)
    lease = claim_job(store, Stage.PUBLISH).lease
    with pytest.raises(ValueError, match="cannot end as running"):
        store.finish_job(lease, JobState.RUNNING)
    store.finish_job(lease, JobState.DONE)
    job = store.get_job(JOB)
    assert (job.state, job.stage, job.finished_at) == (JobState.DONE, Stage.END, START + 9)
    with pytest.raises(FencedError):
        store.finish_job(lease, JobState.DONE)
    assert store.request_cancel(JOB) == job
    assert store.retry_job(JOB) == 0
    assert store.get_job(JOB) == job


def test_why_an_output_was_given_back_is_forgotten_once_it_is_there(store: Store) -> None:
    ingest(store, groups=1)
    commit(store, verified(store, 0))
    lease = claim_job(store, Stage.PUBLISH).lease
    assert store.release(lease, "the bucket is away", forgiven=True).was_held
    assert not store.release(lease, "once more", forgiven=True).was_held
    assert store.get_job(JOB).last_error == "the bucket is away"
    store.finish_job(claim_job(store, Stage.PUBLISH).lease, JobState.DONE)
    assert store.get_job(JOB).last_error is None


def test_why_an_input_was_given_back_is_forgotten_once_it_is_read_no_further(store: Store) -> None:
    store.create_job(new_job())
    store.release(claim_job(store, Stage.INGEST).lease, "the bucket is away", forgiven=True)
    store.request_cancel(JOB)
    assert store.get_job(JOB).last_error is None


def test_only_a_publish_lease_can_finish_a_job(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    with pytest.raises(FencedError):
        store.finish_job(lease, JobState.DONE)


def test_publishing_that_fails_every_time_fails_the_job_and_can_be_retried(store: Store) -> None:
    ingest(store, groups=1)
    commit(store, verified(store, 0))
    for _ in range(3):
        store.release(claim_job(store, Stage.PUBLISH).lease, "the bucket is gone")
    job = store.get_job(JOB)
    assert (job.state, job.error) == (JobState.FAILED, "the bucket is gone")
    assert store.retry_job(JOB) == 1
    job = store.get_job(JOB)
    assert (job.state, job.stage, job.error) == (JobState.RUNNING, Stage.PUBLISH, None)
    finish(store)


# --- cancel ---------------------------------------------------------------------------------


def test_cancelling_a_queued_job_sends_it_to_publish(store: Store) -> None:
    store.create_job(new_job())
    job = store.request_cancel(JOB)
    assert (job.cancel_requested, job.stage) == (True, Stage.PUBLISH)
    assert store.claim_job(JOB, Stage.INGEST, "w", LEASE_SEC) is None
    finish(store, JobState.CANCELLED)
    assert store.get_job(JOB).state is JobState.CANCELLED


def test_cancelling_keeps_finished_work_and_tells_the_holders(store: Store) -> None:
    ingest(store, groups=4, first_stage=Stage.VERIFY)
    held, recording = claim(store, 0).lease, verified(store, 1)
    waiting = claim(store, 2).lease
    store.advance(waiting, Stage.RECORD, RESULTS, NO_TIME)
    job = store.request_cancel(JOB)
    assert job.stage is Stage.RUN
    assert [(i, word) for i, word, _, _ in store.failed_groups(JOB)] == [(3, "cancelled")]
    assert store.heartbeat([held, recording], LEASE_SEC) == (set(), {JOB}, set())
    commit(store, recording)
    commit(store, claim(store, 2, Stage.RECORD).lease)
    store.cancel_group(held)
    assert stage_of(store) is Stage.PUBLISH
    with pytest.raises(FencedError):
        store.cancel_group(held)
    assert store.progress(JOB).groups_done == 2


def test_a_cancelled_group_that_is_given_back_stays_cancelled(store: Store) -> None:
    ingest(store, groups=1)
    held = claim(store, 0).lease
    store.request_cancel(JOB)
    store.release(held, "stopped")
    assert [word for _, word, _, _ in store.failed_groups(JOB)] == ["cancelled"]
    assert stage_of(store) is Stage.PUBLISH


def test_a_cancelled_group_whose_worker_vanished_is_closed_by_the_sweeper(
    store: Store, clock: Clock
) -> None:
    ingest(store, groups=1)
    claim(store, 0)
    store.request_cancel(JOB)
    clock.advance(LEASE_SEC)
    assert store.due() == [DueWork(JOB, Stage.VERIFY, 0, "big")]
    assert store.claim_group(JOB, 0, Stage.VERIFY, "w", LEASE_SEC) is None
    assert stage_of(store) is Stage.PUBLISH


def test_an_expired_lease_does_not_save_a_group_from_cancel(store: Store, clock: Clock) -> None:
    ingest(store, groups=1)
    lease = claim(store, 0).lease
    clock.advance(LEASE_SEC)
    assert store.request_cancel(JOB).stage is Stage.PUBLISH
    assert store.heartbeat([lease], LEASE_SEC) == ({lease}, {JOB}, set())


def test_a_cancelled_ingest_adds_no_work_and_is_left(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    store.add_groups(lease, [new_group(0)], [], 4, position(4))
    assert store.request_cancel(JOB).stage is Stage.INGEST
    assert store.heartbeat([lease], LEASE_SEC) == (set(), {JOB}, set())
    store.add_groups(lease, [new_group(1)], [], 8, position(8))
    assert store.due() == []
    store.release(lease, "cancelled")
    job = store.get_job(JOB)
    assert (job.stage, job.groups_total) == (Stage.PUBLISH, 2)


def test_a_cancelled_ingest_waits_for_its_held_groups(store: Store, clock: Clock) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    store.add_groups(lease, [new_group(0)], [], 4, position(4))
    clock.advance(LEASE_SEC)
    held = claim(store, 0).lease
    job = store.request_cancel(JOB)
    assert job.stage is Stage.RUN
    assert store.claim_job(JOB, Stage.INGEST, "w", LEASE_SEC) is None
    store.cancel_group(held)
    assert stage_of(store) is Stage.PUBLISH
    assert not store.progress(JOB).ingest_done


def test_a_cancelled_ingest_whose_worker_vanished_is_left_at_the_next_claim(
    store: Store, clock: Clock
) -> None:
    store.create_job(new_job())
    claim_job(store, Stage.INGEST)
    store.request_cancel(JOB)
    clock.advance(LEASE_SEC)
    assert store.claim_job(JOB, Stage.INGEST, "w", LEASE_SEC) is None
    assert stage_of(store) is Stage.PUBLISH


# --- retry ----------------------------------------------------------------------------------


def test_only_a_job_that_has_ended_can_be_retried(store: Store) -> None:
    ingest(store)
    with pytest.raises(UsageError, match="is running; only a job that has ended"):
        store.retry_job(JOB)


def test_retry_sends_failed_and_cancelled_groups_back(store: Store) -> None:
    ingest(store, groups=5, first_stage=Stage.PROPOSE)
    store.advance(claim(store, 0, Stage.PROPOSE).lease, Stage.VERIFY, DRAFTS, NO_TIME)
    commit(store, verified(store, 0))
    store.advance(claim(store, 1, Stage.PROPOSE).lease, Stage.VERIFY, DRAFTS, NO_TIME)
    exhaust(store, 1)  # fails at verify, with drafts
    store.advance(claim(store, 2, Stage.PROPOSE).lease, Stage.VERIFY, None, NO_TIME)
    store.advance(claim(store, 2).lease, Stage.RECORD, RESULTS, NO_TIME)
    exhaust(store, 2, Stage.RECORD)  # fails at record, with results
    token = claim(store, 3, Stage.PROPOSE).lease.token
    store.request_cancel(JOB)  # cancels 4; 3 is held
    store.cancel_group(Lease(JOB, 3, Stage.PROPOSE, token, "w1", 1))
    finish(store, JobState.CANCELLED)

    assert store.retry_job(JOB) == 4
    job = store.get_job(JOB)
    assert (job.state, job.stage) == (JobState.RUNNING, Stage.RUN)
    assert (job.cancel_requested, job.error, job.finished_at) == (False, None, None)
    messages = {message.group_index: message.stage for message in store.due()}
    assert messages == {1: Stage.VERIFY, 2: Stage.RECORD, 3: Stage.PROPOSE, 4: Stage.PROPOSE}
    again = claim(store, 3, Stage.PROPOSE).lease
    assert (again.token, again.attempt) == (token + 1, 1)
    assert len(list(store.completions(JOB))) == 4


def test_retry_of_a_failed_ingest_goes_on_from_its_cursor(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    store.add_groups(lease, [new_group(0)], [], 4, position(4))
    store.fail_job(lease, "the file changed")
    assert store.retry_job(JOB) == 2
    work = claim_job(store, Stage.INGEST)
    assert (work.next_group, work.next_row, work.cursor) == (1, 4, position(4))
    assert work.lease.attempt == 1
    store.finish_ingest(work.lease, 4, {})
    commit(store, verified(store, 0))
    finish(store)


def test_retry_of_a_cancelled_job_with_nothing_left_publishes_again(store: Store) -> None:
    ingest(store, groups=1)
    lease = verified(store, 0)
    store.request_cancel(JOB)
    commit(store, lease)
    finish(store, JobState.CANCELLED)
    assert store.retry_job(JOB) == 1
    assert stage_of(store) is Stage.PUBLISH
    finish(store)


def test_a_stopped_worker_gives_work_back_without_using_up_an_attempt(store: Store) -> None:
    ingest(store)
    for _ in range(5):
        work = claim(store, 0)
        assert work.lease.attempt == 1
        store.release(work.lease, "the worker was stopped", forgiven=True)
    assert claim(store, 0).lease.attempt == 1
