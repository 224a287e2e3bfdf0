"""Tenants take turns in the embedded runner by the rule of the fleet's claims."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from contracts.shorthand import found, serving
from contracts.test_budgets import GROUP, claim, limit, record, records
from ledger.builders import LEASE_SEC, NO_TIME, RESULTS
from serve.conftest import made_service
from serve.test_budgets import SERVICE, batch
from serve.visitor import SPEC
from sqlalchemy import update

from specbatch.jobs.running import here
from specbatch.jobs.serve import runner
from specbatch.jobs.serve.runner import SLICE_SEC, Runner, Watch, gives_way, next_job
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.schemas.budgets import Period
from specbatch.schemas.errors import JobInterrupted
from specbatch.schemas.records import GroupWork, JobRow, Stage, StageTiming
from specbatch.schemas.tables import Group, Job
from support.databases import sqlite_store

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 5.0}
TOOK = 50.0
AT_ONCE = 16  # groups that a process of one job holds
LARGE = 64 * 512  # tokens of a group: its estimate is 33 seconds before any has ended


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


# --- with many groups claimed at once -------------------------------------------------------------
@pytest.fixture
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LOOK_EVERY_SEC", 0.0)


def make_large(store: SqlStore) -> None:
    with store._db._writer.begin() as conn:
        conn.execute(update(Group).values(most_tokens=LARGE))


def claim_of(store: SqlStore, job: JobRow) -> GroupWork:
    mine = replace(serving("exact/f32/1"), only_job=job.job_id)
    return found(store.claim_next(Stage.VERIFY, "big", "w", LEASE_SEC, mine))


def end_group(store: SqlStore, work: GroupWork, took: float = 2 * TOOK) -> None:
    store.advance(work.lease, Stage.RECORD, RESULTS, StageTiming(took))
    at = (work.lease.job_id, work.lease.group_index or 0)
    lease = found(store.claim_group(*at, Stage.RECORD, "r", LEASE_SEC)).lease
    store.commit_group(lease, records(work), NO_TIME, {})


def take_turn(store: SqlStore, job: JobRow) -> int:
    """A turn as the embedded runner takes it. Returns how many groups ended."""
    watch, ended = Watch(store, SERVICE, job, ()), 0
    held = [claim_of(store, job) for _ in range(AT_ONCE)]
    while not watch.wants_stop():
        end_group(store, held.pop(0))
        held.append(claim_of(store, job))
        ended += 1
    for work in held:
        store.release(work.lease, "stopped", forgiven=True)
    return ended


@pytest.mark.usefixtures("looks_each_time")
def test_a_turn_is_as_long_however_many_groups_are_claimed_at_once(store: SqlStore) -> None:
    for tenant in ("x", "y"):
        batch(store, f"batch_{tenant}", tenant, groups=40)
    make_large(store)
    for tenant in ("x", "y", "x"):
        job = next_in(store)
        assert job.tenant == tenant
        took = take_turn(store, job) * 2 * TOOK
        assert SLICE_SEC <= took <= 2 * SLICE_SEC + 2 * TOOK, "what it is behind, and its slice"


@pytest.mark.usefixtures("looks_each_time")
def test_a_job_does_not_stop_for_another_before_a_group_of_this_turn_has_ended(
    store: SqlStore,
) -> None:
    """Also where its tenant is far ahead: the job may be the next one because it has to stop."""
    batch(store, "batch_x", "x", groups=4)
    first = next_in(store)
    end_group(store, claim_of(store, first), took=2 * SLICE_SEC)
    batch(store, "batch_y", "y")
    assert next_in(store).tenant == "y"
    assert gives_way(first, store.in_turn([first.job_id, "job-batch_y"]))
    watch = Watch(store, SERVICE, first, ())
    assert not watch.wants_stop()
    end_group(store, claim_of(store, first))
    assert watch.wants_stop()
    store.request_cancel(first.job_id)
    stopping = next_in(store)
    assert stopping.tenant == "x"
    assert not Watch(store, SERVICE, stopping, ()).wants_stop()


@contextmanager
def own_sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_sigterm_that_comes_while_a_job_stops_for_others_ends_the_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job waits for its place in this process all the time: no model is loaded."""
    looks = Watch.wants_stop

    def stops_and_is_ended(watch: Watch) -> bool:
        record(store, found(claim(store)))  # the rest of the day's tokens
        assert looks(watch), "it stops for its budget"
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the handler raises")

    with made_service(tmp_path / "dir", {}) as made, own_sigterm(), here._ONE_AT_A_TIME:
        store = made.service.store
        assert isinstance(store, SqlStore)
        batch(store, "batch_1", "acme")
        with store._db._writer.begin() as conn:
            conn.execute(update(Job).values(spec=SPEC))
        limit(store, GROUP, Period.DAY)
        one = Runner(made.settings, store, made.service.client, SERVICE)
        one.take_sigterm()
        monkeypatch.setattr(Watch, "wants_stop", stops_and_is_ended)
        with pytest.raises(JobInterrupted):
            one.run_next()
