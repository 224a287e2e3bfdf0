"""What attempts used beside devices, with one test body for both databases."""

from __future__ import annotations

import threading
from dataclasses import astuple, replace
from typing import Any

import pytest
from contracts.shorthand import MANIFEST, claim, claim_job, ingest, verified
from ledger.builders import JOB, NO_TIME, RESULTS, completion

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas import usage
from specbatch.schemas.errors import FencedError
from specbatch.schemas.records import JobState, Lease, Stage
from specbatch.schemas.usage import Quantities, StageUsage, UsageMeter

PRICES = {"cpu_hour": 40_000}


def meter(**counts: int) -> UsageMeter:
    made = UsageMeter(PRICES)
    made.count(**counts)
    return made


def the_only(store: Store, **asked: Any) -> StageUsage:
    [one] = [u for u in store.stage_usage(JOB) if all(getattr(u, n) == v for n, v in asked.items())]
    return one


def commit(store: Store, lease: Lease, made: UsageMeter) -> None:
    index = lease.group_index or 0
    rows = [completion(4 * index + row) for row in range(4)]
    store.commit_group(lease, rows, NO_TIME, {}, made)


def test_results_and_what_they_used_come_together_or_not_at_all(store: Store) -> None:
    ingest(store, groups=1)
    lease = verified(store, 0)
    stale = replace(lease, token=lease.token - 1)
    with pytest.raises(FencedError):
        commit(store, stale, meter(sent_bytes=5))
    assert list(store.stage_usage(JOB)) == []
    commit(store, lease, meter(sent_bytes=7))
    one = the_only(store, stage=Stage.RECORD)
    assert (one.kept, one.in_flight, one.attempts, one.prices) == (True, False, 1, PRICES)
    assert one.used.sent_bytes == 7
    assert store.stage_usage() == store.stage_usage(JOB)
    assert list(store.stage_usage("nosuchjob")) == []


def test_each_write_of_results_keeps_what_its_attempt_used(store: Store) -> None:
    ingest(store, groups=1, first_stage=Stage.PROPOSE)
    drafting = claim(store, 0, Stage.PROPOSE).lease
    store.advance(drafting, Stage.VERIFY, None, NO_TIME, usage=meter(object_reads=1))
    verifying = claim(store, 0).lease
    store.advance(verifying, Stage.RECORD, RESULTS, NO_TIME, usage=meter(object_reads=2))
    commit(store, claim(store, 0, Stage.RECORD).lease, meter(object_reads=3))
    publishing = claim_job(store, Stage.PUBLISH).lease
    store.finish_job(publishing, JobState.DONE, None, MANIFEST, meter(object_reads=4))
    reads = {one.stage: one.used.object_reads for one in store.stage_usage(JOB)}
    assert reads == {Stage.PROPOSE: 1, Stage.VERIFY: 2, Stage.RECORD: 3, Stage.PUBLISH: 4}
    assert all(one.kept for one in store.stage_usage(JOB))


def test_late_and_repeated_reports_change_nothing(store: Store) -> None:
    ingest(store, groups=1)
    lease = verified(store, 0)
    store.report_usage({lease: meter(stored_bytes=10)})
    in_flight = the_only(store, stage=Stage.RECORD)
    assert (in_flight.kept, in_flight.in_flight) == (False, True)
    commit(store, lease, meter(stored_bytes=30))
    for late in (20, 40):  # what is kept may be pinned
        store.report_usage({lease: meter(stored_bytes=late)})
    one = the_only(store, stage=Stage.RECORD)
    assert (one.used.stored_bytes, one.kept, one.in_flight) == (30, True, False)


def test_what_a_given_up_attempt_used_stays_beside_the_next_ones(store: Store) -> None:
    ingest(store, groups=1)
    first = claim(store, 0).lease
    store.report_usage({first: meter(received_bytes=3)})
    store.release(first, "it broke")
    assert not the_only(store, stage=Stage.VERIFY).in_flight
    second = claim(store, 0).lease
    store.advance(second, Stage.RECORD, RESULTS, NO_TIME, usage=meter(received_bytes=4))
    used = {one.kept: one.used.received_bytes for one in store.stage_usage(JOB)}
    assert used == {False: 3, True: 4}


def test_statements_of_the_thread_that_works_are_counted_with_the_one_that_stores_them(
    store: Store,
) -> None:
    ingest(store, groups=1)
    lease = verified(store, 0)
    made = UsageMeter()
    elsewhere = threading.Thread(target=store.get_job, args=(JOB,))
    with made.measuring():
        store.get_job(JOB)
        elsewhere.start()
        elsewhere.join()
        before = made.read().store_statements
        commit(store, lease, made)
    assert before == 1
    stored = the_only(store, stage=Stage.RECORD).used.store_statements
    assert before + 3 < stored <= made.read().store_statements


def test_work_that_is_carried_to_another_thread_counts_for_the_attempt() -> None:
    made = UsageMeter()
    with made.measuring():
        work = usage.carried(lambda: (usage.count(sent_bytes=1), sum(range(200_000))))
    before = made.read().cpu_ticks
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert made.read().sent_bytes == 1
    assert made.read().cpu_ticks > before
    usage.count(sent_bytes=1)
    assert made.read().sent_bytes == 1, "this thread works for nobody"


def test_quantities_add_up_counter_by_counter() -> None:
    many = Quantities(*range(1, 8))
    assert astuple(many + many) == tuple(2 * n for n in range(1, 8))
