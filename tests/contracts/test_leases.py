"""Who holds a group, for how long, and what is due: one test body for both databases."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from contracts.shorthand import (
    claim,
    claim_job,
    commit,
    exhaust,
    finish,
    ingest,
    stage_of,
    successes,
    together,
    verified,
)
from ledger.builders import (
    DRAFTS,
    JOB,
    LEASE_SEC,
    NO_TIME,
    RESULTS,
    Clock,
    new_group,
    new_job,
    position,
)

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import (
    FencedError,
)
from specbatch.schemas.records import (
    DueWork,
    JobState,
    Lease,
    NewJob,
    Prompts,
    Released,
    Stage,
)

# --- leases ---------------------------------------------------------------------------------


def test_a_claimed_group_cannot_be_claimed_again(store: Store) -> None:
    ingest(store)
    work = claim(store, 0)
    assert work.prompts == new_group(0).prompts
    assert (work.rows, work.drafts, work.results) == (4, None, None)
    assert work.lease == Lease(JOB, 0, Stage.VERIFY, 1, "w1", 1)
    assert store.claim_group(JOB, 0, Stage.VERIFY, "w2", LEASE_SEC) is None
    assert store.claim_group(JOB, 0, Stage.VERIFY, "w1", LEASE_SEC) is None


def test_a_group_can_only_be_claimed_at_its_stage(store: Store) -> None:
    ingest(store)
    for stage in set(Stage) - {Stage.VERIFY}:
        assert store.claim_group(JOB, 0, stage, "w", LEASE_SEC) is None
    for stage in set(Stage):
        assert store.claim_job(JOB, stage, "w", LEASE_SEC) is None, "the job is at RUN"
    assert store.claim_group(JOB, 7, Stage.VERIFY, "w", LEASE_SEC) is None


def test_an_expired_lease_can_be_taken_over_and_the_old_holder_is_fenced(
    store: Store, clock: Clock
) -> None:
    ingest(store)
    old = claim(store, 0).lease
    clock.advance(LEASE_SEC - 1)
    assert store.claim_group(JOB, 0, Stage.VERIFY, "w2", LEASE_SEC) is None
    clock.advance(1)
    new = claim(store, 0, owner="w2").lease
    assert (new.token, new.attempt) == (2, 2)
    with pytest.raises(FencedError, match="fencing token 1"):
        store.advance(old, Stage.RECORD, RESULTS, NO_TIME)
    with pytest.raises(FencedError):
        store.cancel_group(old)
    assert not store.release(old, "too late").was_held
    assert store.heartbeat([old, new], LEASE_SEC) == ({old}, set(), set())
    store.advance(new, Stage.RECORD, RESULTS, NO_TIME)


@pytest.mark.parametrize(
    "change", [{"token": 2}, {"owner": "w2"}, {"stage": Stage.RECORD}, {"group_index": 1}]
)
def test_a_lease_must_fit_in_every_field(store: Store, change: dict[str, Any]) -> None:
    ingest(store)
    lease = replace(claim(store, 0).lease, **change)
    assert store.heartbeat([lease], LEASE_SEC) == ({lease}, set(), set())
    with pytest.raises(FencedError):
        store.cancel_group(lease)
    with pytest.raises(FencedError):
        store.commit_group(lease, [], NO_TIME, {})


def test_heartbeats_keep_leases_alive(store: Store, clock: Clock) -> None:
    ingest(store, groups=3)
    leases = [claim(store, index).lease for index in range(3)]
    for _ in range(5):
        clock.advance(LEASE_SEC - 1)
        assert store.heartbeat(leases, LEASE_SEC) == (set(), set(), set())
    assert store.due() == []
    assert store.claim_group(JOB, 0, Stage.VERIFY, "w2", LEASE_SEC) is None


def test_a_heartbeat_covers_jobs_and_many_groups(store: Store, clock: Clock) -> None:
    store.create_job(new_job())
    job_lease = claim_job(store, Stage.INGEST).lease
    store.add_groups(job_lease, [new_group(i) for i in range(600)], [], 2400, position())
    leases = [job_lease, *(claim(store, index).lease for index in range(0, 600, 3))]
    stale = replace(leases[7], token=9)
    clock.advance(LEASE_SEC - 1)
    assert store.heartbeat([*leases, stale], LEASE_SEC) == ({stale}, set(), set())
    assert store.heartbeat([], LEASE_SEC) == (set(), set(), set())
    clock.advance(LEASE_SEC - 1)
    assert len(store.due(limit=1000)) == 400


def test_a_released_group_is_ready_again_with_its_error(store: Store) -> None:
    ingest(store)
    store.release(claim(store, 0).lease, "engine restarted")
    assert claim(store, 0, owner="w2").lease.attempt == 2


def test_a_release_says_whether_the_lease_was_held_and_what_was_cut_off(store: Store) -> None:
    store.create_job(new_job())
    reading = claim_job(store, Stage.INGEST).lease
    assert store.release(reading, "the input is away") == Released(True)
    assert store.release(reading, "the input is away") == Released(False)
    reading = claim_job(store, Stage.INGEST).lease
    assert reading.attempt == 2
    store.add_groups(reading, [new_group(0)], [], 4, position())
    for attempt in (1, 2, 3):
        lease = claim(store, 0).lease
        assert lease.attempt == attempt
        released = store.release(lease, "it broke")
        assert (released.was_held, released.split_off is None) == (True, attempt < 3)
        assert store.release(lease, "it broke") == Released(False)
    assert released.split_off is not None
    assert claim(store, released.split_off).rows == 2


def test_a_release_of_a_job_that_is_gone_gives_nothing_back(store: Store) -> None:
    ingest(store, groups=1)
    lease = claim(store, 0).lease
    assert store.release(replace(lease, job_id="no-such-job"), "it broke") == Released(False)


def test_what_is_forgiven_costs_no_attempt(store: Store) -> None:
    store.create_job(new_job())
    for _ in range(5):
        reading = claim_job(store, Stage.INGEST).lease
        assert reading.attempt == 1
        store.release(reading, "the worker was stopped", forgiven=True)
    store.add_groups(claim_job(store, Stage.INGEST).lease, [new_group(0)], [], 4, position())
    for _ in range(5):
        lease = claim(store, 0).lease
        assert lease.attempt == 1
        assert store.release(lease, "the worker was stopped", forgiven=True) == Released(True)


def test_an_input_that_cannot_be_read_ends_the_job_after_its_attempts(store: Store) -> None:
    store.create_job(new_job())
    for _ in range(3):
        assert not store.get_job(JOB).state.is_final
        store.release(claim_job(store, Stage.INGEST).lease, "the input is away")
    job = store.get_job(JOB)
    assert (job.state, job.error) == (JobState.FAILED, "the input is away")
    assert store.claim_job(JOB, Stage.INGEST, "w", LEASE_SEC) is None


def test_an_input_whose_readers_vanish_ends_the_job_at_the_next_claim(
    store: Store, clock: Clock
) -> None:
    store.create_job(new_job())
    for _ in range(3):
        claim_job(store, Stage.INGEST)
        clock.advance(LEASE_SEC)
    assert not store.get_job(JOB).state.is_final
    assert store.claim_job(JOB, Stage.PUBLISH, "w", LEASE_SEC) is None
    assert not store.get_job(JOB).state.is_final, "it is at another stage"
    assert store.claim_job(JOB, Stage.INGEST, "w", LEASE_SEC) is None
    assert store.get_job(JOB).state is JobState.FAILED


def test_a_group_fails_when_its_attempts_are_used_up(store: Store) -> None:
    ingest(store)
    exhaust(store, 0)
    assert store.claim_group(JOB, 0, Stage.VERIFY, "w", LEASE_SEC) is None
    prompts = Prompts(new_group(0).prompts, 0, 4)
    assert store.failed_groups(JOB) == [(0, "failed", prompts, "out of memory 2")]
    assert stage_of(store) is Stage.RUN, "group 1 is open"
    exhaust(store, 1)
    assert stage_of(store) is Stage.PUBLISH


def test_a_row_whose_workers_vanish_fails_at_the_next_claim(store: Store, clock: Clock) -> None:
    ingest(store, groups=1, rows=1)
    for _ in range(3):
        claim(store, 0)
        clock.advance(LEASE_SEC)
    assert store.due() == [DueWork(JOB, Stage.VERIFY, 0, "big")]
    assert store.claim_group(JOB, 0, Stage.VERIFY, "w", LEASE_SEC) is None
    [(_, word, _, error)] = store.failed_groups(JOB)
    assert (word, error) == (
        "failed",
        "the worker vanished 3 times while it held this work",
    )
    assert stage_of(store) is Stage.PUBLISH


def test_attempts_begin_anew_at_each_stage(store: Store) -> None:
    ingest(store, first_stage=Stage.PROPOSE)
    for stage, to, artefact in (
        (Stage.PROPOSE, Stage.VERIFY, DRAFTS),
        (Stage.VERIFY, Stage.RECORD, RESULTS),
    ):
        for _ in range(2):
            store.release(claim(store, 0, stage).lease, "once more")
        lease = claim(store, 0, stage).lease
        assert lease.attempt == 3
        store.advance(lease, to, artefact, NO_TIME)
    work = claim(store, 0, Stage.RECORD)
    assert (work.drafts, work.results, work.lease.attempt) == (DRAFTS, RESULTS, 1)


def test_a_group_that_cannot_be_proposed_for_is_verified_without_drafts(store: Store) -> None:
    ingest(store, first_stage=Stage.PROPOSE)
    exhaust(store, 0, Stage.PROPOSE)
    work = claim(store, 0, Stage.VERIFY)
    assert (work.drafts, work.lease.attempt) == (None, 1)
    assert store.failed_groups(JOB) == []


def test_a_group_whose_proposers_vanish_is_verified_without_drafts(
    store: Store, clock: Clock
) -> None:
    ingest(store, first_stage=Stage.PROPOSE)
    for _ in range(3):
        claim(store, 0, Stage.PROPOSE)
        clock.advance(LEASE_SEC)
    assert store.claim_group(JOB, 0, Stage.PROPOSE, "w", LEASE_SEC) is None
    assert claim(store, 0, Stage.VERIFY).lease.attempt == 1


def test_proposing_may_bring_nothing(store: Store) -> None:
    ingest(store, first_stage=Stage.PROPOSE)
    store.advance(claim(store, 0, Stage.PROPOSE).lease, Stage.VERIFY, None, NO_TIME)
    assert claim(store, 0).drafts is None


def test_impossible_steps_are_refused(store: Store) -> None:
    ingest(store)
    lease = claim(store, 0).lease
    for to in (Stage.PROPOSE, Stage.VERIFY, Stage.DONE, Stage.FAILED):
        with pytest.raises(ValueError, match="cannot advance"):
            store.advance(lease, to, RESULTS, NO_TIME)
    with pytest.raises(ValueError, match="results"):
        store.advance(lease, Stage.RECORD, None, NO_TIME)


def test_exactly_one_of_many_claimers_wins(store: Store) -> None:
    ingest(store, groups=5)
    for index in range(5):
        claims = together(
            *[
                partial(store.claim_group, JOB, index, Stage.VERIFY, f"w{n}", LEASE_SEC)
                for n in range(8)
            ]
        )
        assert sum(work is not None for work in successes(claims)) == 1


# --- what is due ----------------------------------------------------------------------------


def test_due_names_what_is_ready_and_who_must_serve_it(store: Store, clock: Clock) -> None:
    store.create_job(new_job())
    assert store.due() == [DueWork(JOB, Stage.INGEST, None)]
    lease = claim_job(store, Stage.INGEST).lease
    assert store.due() == []
    store.add_groups(lease, [new_group(0, first_stage=Stage.PROPOSE)], [], 4, position(4))
    store.add_groups(lease, [new_group(1)], [], 8, position(8))
    assert store.due() == [
        DueWork(JOB, Stage.PROPOSE, 0, "small"),
        DueWork(JOB, Stage.VERIFY, 1, "big"),
    ]
    store.finish_ingest(lease, 8, {})
    held = claim(store, 1).lease
    store.advance(held, Stage.RECORD, RESULTS, NO_TIME)
    assert DueWork(JOB, Stage.RECORD, 1) in store.due()
    claim(store, 1, Stage.RECORD)
    assert store.due() == [DueWork(JOB, Stage.PROPOSE, 0, "small")]
    clock.advance(LEASE_SEC)
    assert len(store.due()) == 2


def test_due_gives_the_longest_ready_first(store: Store, clock: Clock) -> None:
    ingest(store, groups=3)
    clock.advance(1)
    store.release(claim(store, 0).lease, "again")
    clock.advance(1)
    store.create_job(new_job("job00000000000002"))
    messages = store.due()
    assert [message.group_index for message in messages] == [None, 1, 2, 0]
    assert store.due(limit=2) == messages[:3]
    assert store.due(limit=1) == messages[:2]


def test_what_nobody_serves_hides_nothing_that_came_after_it(store: Store, clock: Clock) -> None:
    def planned(job: NewJob, groups: int) -> None:
        store.create_job(job)
        work = store.claim_job(job.job_id, Stage.INGEST, "i", LEASE_SEC)
        assert work is not None
        store.add_groups(work.lease, [new_group(i) for i in range(groups)], [], 8, position(8))
        store.finish_ingest(work.lease, 8, {})
        clock.advance(1)

    planned(new_job(), 4)
    later = [new_job(f"job0000000000000{i}", verifier=f"model {i}") for i in (2, 3)]
    for job in later:
        planned(job, 2)
    store.advance(claim(store, 3).lease, Stage.RECORD, RESULTS, NO_TIME)
    clock.advance(1)
    urgent = new_job("job00000000000004", priority=0)
    planned(urgent, 2)
    assert store.due(limit=1) == [
        DueWork(JOB, Stage.VERIFY, 0, "big"),
        *(DueWork(job.job_id, Stage.VERIFY, 0, job.verifier) for job in later),
        DueWork(JOB, Stage.RECORD, 3),
        DueWork(urgent.job_id, Stage.VERIFY, 0, "big", 0),
    ]
    assert store.due(job_id=later[0].job_id) == [
        DueWork(later[0].job_id, Stage.VERIFY, index, "model 2") for index in (0, 1)
    ]


def test_a_finished_job_is_not_due(store: Store) -> None:
    ingest(store, groups=1)
    commit(store, verified(store, 0))
    assert store.due() == [DueWork(JOB, Stage.PUBLISH, None)]
    finish(store)
    assert store.due() == []
