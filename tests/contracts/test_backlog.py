"""What waits and who works, with one test body for both databases."""

from __future__ import annotations

import pytest
from contracts.shorthand import claim, claim_job, commit, exhaust, finish, ingest, verified
from ledger.builders import JOB, LEASE_SEC, START, Clock, new_group, new_job, position

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.backlog import StageBacklog, WorkerNow
from specbatch.schemas.provenance import TICKS_PER_SEC
from specbatch.schemas.records import CLAIMABLE, JobState, RejectedRow, Stage
from specbatch.schemas.timekeeping import Device, NewSession, SessionTime

DEVICE = Device("h200", "eu-west", "spot", 2_000_000)


def test_an_empty_store_has_every_stage_and_nothing_in_it(store: Store) -> None:
    look = store.backlog()
    assert look.at == START
    assert look.stages == tuple(StageBacklog(stage) for stage in CLAIMABLE)
    assert look.jobs == {JobState.QUEUED: 0, JobState.RUNNING: 0}
    assert (look.rows_failed, look.workers) == (0, ())


def test_groups_are_ready_or_leased_at_their_stage(store: Store, clock: Clock) -> None:
    ingest(store, groups=4)
    clock.advance(5)
    verified(store, 0)
    claim(store, 1)
    clock.advance(2)
    look = store.backlog()
    assert look.at_stage(Stage.VERIFY) == StageBacklog(
        Stage.VERIFY, ready=2, leased=1, oldest_ready_sec=7.0
    )
    assert look.at_stage(Stage.RECORD) == StageBacklog(Stage.RECORD, leased=1)
    assert look.jobs == {JobState.QUEUED: 0, JobState.RUNNING: 1}


def test_a_lease_that_ran_out_is_ready_again_since_then(store: Store, clock: Clock) -> None:
    ingest(store, groups=1)
    claim(store, 0)
    clock.advance(LEASE_SEC + 3)
    assert store.backlog().at_stage(Stage.VERIFY) == StageBacklog(
        Stage.VERIFY, ready=1, expired=1, oldest_ready_sec=3.0
    )


def test_jobs_wait_to_be_read_and_written_but_not_while_reading_is_paused(
    store: Store, clock: Clock
) -> None:
    store.create_job(new_job())
    clock.advance(4)
    look = store.backlog()
    assert look.jobs == {JobState.QUEUED: 1, JobState.RUNNING: 0}
    assert look.at_stage(Stage.INGEST) == StageBacklog(Stage.INGEST, 1, oldest_ready_sec=4.0)
    lease = claim_job(store, Stage.INGEST).lease
    assert store.backlog().at_stage(Stage.INGEST) == StageBacklog(Stage.INGEST, leased=1)
    store.add_groups(lease, [new_group(0)], [], 4, position())
    assert store.pause_ingest(lease, most_open=1) == 0
    assert store.backlog().at_stage(Stage.INGEST) == StageBacklog(Stage.INGEST)
    assert store.backlog().at_stage(Stage.VERIFY).ready == 1


@pytest.mark.parametrize("is_over", [False, True])
def test_what_failed_counts_while_its_job_goes_on(store: Store, is_over: bool) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    bad = [RejectedRow(8, None, "empty_prompt", "the prompt is empty")]
    store.add_groups(lease, [new_group(0), new_group(1)], bad, 9, position())
    store.finish_ingest(lease, 9, {})
    exhaust(store, 0)
    assert store.backlog().rows_failed == 5
    commit(store, verified(store, 1))
    if is_over:
        finish(store, JobState.PARTIAL)
    look = store.backlog()
    assert look.rows_failed == (0 if is_over else 5)
    assert look.at_stage(Stage.PUBLISH).ready == (0 if is_over else 1)


def test_workers_are_those_that_have_not_ended(store: Store, clock: Clock) -> None:
    for session, owner in (("s-2", "b:1"), ("s-1", "a:1"), ("s-3", "gone:1")):
        store.begin_session(NewSession(session, owner, DEVICE, age_ticks=10 * TICKS_PER_SEC))
    store.end_session(SessionTime("s-3", 1), {})
    store.report_time(SessionTime("s-1", 8 * TICKS_PER_SEC, TICKS_PER_SEC, TICKS_PER_SEC), {})
    ingest(store, groups=2)
    claim(store, 0, owner="a:1")
    clock.advance(LEASE_SEC - 1)
    claim(store, 1, owner="a:1")
    first, second = store.backlog().workers
    assert first == WorkerNow(
        "s-1", "a:1", DEVICE, 10 + LEASE_SEC - 1, LEASE_SEC - 1,
        8 * TICKS_PER_SEC, TICKS_PER_SEC, TICKS_PER_SEC, leases=2,
    )  # fmt: skip
    assert first.busy_ticks / first.seen == 0.75
    assert first.usd == pytest.approx(8 / 3600 * 2)
    assert (second.owner, second.seen, second.leases) == ("b:1", 0, 0)
    clock.advance(1)  # the first lease runs out
    assert store.backlog().workers[0].leases == 1


def test_what_is_over_is_not_in_the_way(store: Store) -> None:
    ingest(store, groups=1)
    commit(store, verified(store, 0))
    finish(store)
    assert store.backlog().stages == tuple(StageBacklog(stage) for stage in CLAIMABLE)
    assert store.get_job(JOB).state is JobState.DONE
