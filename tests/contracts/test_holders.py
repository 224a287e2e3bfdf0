"""Who holds a job's work, and the leases of those who are known to be dead."""

from __future__ import annotations

import pytest
from contracts.shorthand import claim, claim_job, ingest
from ledger.builders import JOB, LEASE_SEC, Clock, new_job

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.sql import transactions
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.records import Stage


def test_holders_are_those_whose_leases_have_not_run_out(store: Store, clock: Clock) -> None:
    ingest(store)
    assert store.holders(JOB) == []
    claim(store, 0)
    assert store.holders(JOB) == ["w1"]
    assert store.holders("no-such-job") == []
    clock.now += LEASE_SEC
    assert store.holders(JOB) == []


def test_the_reader_of_the_input_is_a_holder_until_its_lease_runs_out(
    store: Store, clock: Clock
) -> None:
    store.create_job(new_job())
    claim_job(store, Stage.INGEST)
    assert store.holders(JOB) == ["ingester"]
    clock.now += LEASE_SEC
    assert store.holders(JOB) == []


def test_several_jobs_are_read_at_once_as_each_of_them_is(store: Store) -> None:
    ingest(store)
    claim(store, 0)
    store.create_job(new_job("job-2"))  # without groups
    both = [JOB, "job-2", "no-such-job"]
    assert store.holders_of(both) == {JOB: ["w1"]}
    assert store.jobs_of_ids(both) == {one: store.get_job(one) for one in both[:2]}
    assert store.progress_of(both) == {one: store.progress(one) for one in both[:2]}
    assert store.jobs_of_ids([]) == store.progress_of([]) == store.holders_of([]) == {}


def test_more_jobs_are_read_at_once_than_a_statement_can_name(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "IDS_AT_ONCE", 2)
    ingest(store)
    store.create_job(new_job("job-2"))
    both = [JOB, "job-2"]
    many = [JOB, "no-job", "nor-this", "nor-that", "job-2"]
    assert store.jobs_of_ids(many) == {one: store.get_job(one) for one in both}
    assert store.progress_of(many) == {one: store.progress(one) for one in both}
    assert [turn.job.job_id for turn in store.in_turn(many)] == sorted(both)


def test_leases_of_a_dead_owner_end_at_once_and_those_of_others_stay(store: Store) -> None:
    ingest(store)
    held = claim(store, 0).lease
    assert store.expire_leases(JOB, "w2") == 0
    assert store.expire_leases(JOB, "w1") == 1
    assert store.holders(JOB) == []
    taken = store.claim_group(JOB, 0, Stage.VERIFY, "w2", LEASE_SEC)
    assert taken is not None
    assert taken.lease.token == held.token + 1
    assert taken.lease.attempt == held.attempt + 1, "it is as if the lease had run out"
    assert store.heartbeat([held], LEASE_SEC).lost == {held}


def test_who_works_on_one_job_is_given_no_other(store: Store) -> None:
    ingest(store)
    other = Serves.of("models/verifier", {})
    assert store.claim_next(
        Stage.VERIFY, store.get_job(JOB).verifier, "w1", LEASE_SEC, _only(other, "another")
    ) is None  # fmt: skip
    assert store.claim_group(JOB, 0, Stage.VERIFY, "w1", LEASE_SEC, _only(other, "another")) is None


def _only(serves: Serves, job_id: str) -> Serves:
    return Serves(serves.model, serves.classes, only_job=job_id)
