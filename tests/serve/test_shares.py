"""Tenants take turns in the embedded runner by the rule of the fleet's claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from contracts.shorthand import serving
from ledger.builders import LEASE_SEC, RESULTS
from serve.test_budgets import SERVICE, batch

from specbatch.jobs.serve.runner import SLICE_SEC, gives_way, next_job
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.schemas.records import JobRow, Stage, StageTiming
from support.databases import sqlite_store

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 5.0}
TOOK = 50.0


@pytest.fixture
def store() -> Iterator[SqlStore]:
    opened = sqlite_store(weights=WEIGHTS)
    yield opened
    opened.close()


def next_in(store: SqlStore) -> JobRow:
    found = next_job(store, SERVICE)
    assert found is not None
    return found[1]


def work_on(store: SqlStore, job: JobRow, groups: int) -> int:
    """Claim and verify groups as a process of this one job does, until it has to give way."""
    mine = replace(serving("exact/f32/1"), only_job=job.job_id)
    open_jobs = [b.job_id for b in store.open_batches(SERVICE) if b.job_id]
    for done in range(groups):
        if done and gives_way(job, store.in_turn(open_jobs)):
            return done
        work = store.claim_next(Stage.VERIFY, "big", "w", LEASE_SEC, mine)
        assert work is not None
        assert work.lease.job_id == job.job_id
        store.advance(work.lease, Stage.RECORD, RESULTS, StageTiming(TOOK))
    return groups


def test_tenants_share_the_process_by_their_weights_to_within_a_slice(store: SqlStore) -> None:
    for tenant in WEIGHTS:
        batch(store, f"batch_{tenant}", tenant, groups=150)
    had: Counter[str] = Counter()
    while had.total() < 160:
        job = next_in(store)
        had[job.tenant] += work_on(store, job, 160 - had.total())
    for tenant, weight in WEIGHTS.items():
        due = 160 * TOOK * weight / sum(WEIGHTS.values())
        assert had[tenant] * TOOK == pytest.approx(due, abs=SLICE_SEC + TOOK), had


def test_who_comes_while_another_tenants_job_runs_has_nothing_of_the_past(store: SqlStore) -> None:
    batch(store, "batch_1", "x", groups=60)
    assert work_on(store, next_in(store), 20) == 20
    batch(store, "batch_2", "y", groups=60)
    slices = int(SLICE_SEC / TOOK)
    first = next_in(store)
    assert first.tenant == "y"
    turn = work_on(store, first, 60)
    assert turn <= slices + 2, "it began where the other one was"
    assert next_in(store).tenant == "x"


def test_a_job_does_not_stop_for_another_one_of_its_tenant(store: SqlStore) -> None:
    batch(store, "batch_1", "x", groups=30)
    batch(store, "batch_2", "x", groups=30)
    assert work_on(store, next_in(store), 30) == 30
