"""Batches of tenants with budgets: which one the runner does next, and what clients are told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from contracts.shorthand import claim_job, found
from contracts.test_budgets import GROUP, claim, ingest, limit, record
from ledger.builders import NO_TIME, RESULTS
from sqlalchemy import event

from specbatch.jobs.serve.collecting import Stop, not_run, why_stopped
from specbatch.jobs.serve.reconciler import CANCELLED
from specbatch.jobs.serve.runner import Runner, next_job
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.runtime.client import Client
from specbatch.schemas.budgets import Period
from specbatch.schemas.errors import ModelChangedError, UsageError
from specbatch.schemas.records import JobState, Stage
from specbatch.schemas.serving import BatchRow, BatchStatus, NewBatch, Purpose, StoredFile
from specbatch.schemas.settings import Settings
from support.databases import sqlite_store

SERVICE = "here"


@pytest.fixture
def store() -> Iterator[SqlStore]:
    opened = sqlite_store()
    yield opened
    opened.close()


def batch(store: SqlStore, name: str, tenant: str, groups: int = 2) -> BatchRow:
    """A batch whose job's input is read."""
    file = StoredFile(f"file-{name}", tenant, Purpose.BATCH, name, 1, "f" * 64, SERVICE)
    store.add_file(file)
    ask = (name, tenant, "/v1/completions", file.file_id, "24h", 86_400.0, "digest", SERVICE)
    store.add_batch(NewBatch(*ask), 10)
    store.begin_batch(name, "small", 4 * groups)
    ingest(store, f"job-{name}", tenant, groups)
    return store.note_batch_job(name, f"job-{name}")


def next_batch(store: SqlStore) -> str | None:
    found = next_job(store, SERVICE)
    return None if found is None else found[0].batch_id


def test_a_batch_does_not_wait_for_a_budget_while_some_of_it_is_under_way(store: SqlStore) -> None:
    batch(store, "batch_1", "acme")
    limit(store, GROUP, Period.DAY)
    assert next_batch(store) == "batch_1"
    work = claim(store)
    assert work is not None
    assert next_batch(store) == "batch_1", "some of it is under way"
    store.advance(work.lease, Stage.RECORD, RESULTS, NO_TIME)
    assert next_batch(store) == "batch_1", "its results wait to be recorded"
    lease = store.claim_group("job-batch_1", 0, Stage.RECORD, "r", 60.0)
    assert lease is not None
    store.release(lease.lease, "stopped", forgiven=True)
    assert next_batch(store) == "batch_1"
    limit(store, 1, Period.MONTH)  # nothing more is covered, this month
    assert next_batch(store) == "batch_1"


def test_a_batch_that_waits_for_a_budget_lets_other_tenants_batches_pass(store: SqlStore) -> None:
    batch(store, "batch_1", "acme")
    batch(store, "batch_2", "else")
    limit(store, GROUP, Period.DAY)
    work = claim(store)
    assert work is not None
    assert work.lease.job_id == "job-batch_1"
    record(store, work)
    turns = store.in_turn(["job-batch_1", "job-batch_2"])
    assert turns[0].job.tenant == "acme", "it would be its turn"
    assert next_batch(store) == "batch_2"
    work = claim(store)
    assert work is not None
    assert work.lease.job_id == "job-batch_2"
    assert next_batch(store) == "batch_2", "some of it is under way"


def test_what_a_batch_waits_for_is_told(store: SqlStore) -> None:
    batch(store, "batch_1", "acme")
    batch(store, "batch_2", "else")
    limit(store, GROUP, Period.DAY)
    work = claim(store)
    assert work is not None
    record(store, work)
    assert next_batch(store) == "batch_2"
    told = store.batch("acme", "batch_1")
    assert told is not None
    assert (told.waits_because or "").startswith("waits for its tenant's budget of 64 tokens a day")
    limit(store, 4 * GROUP, Period.DAY)
    assert next_batch(store) == "batch_1"


def test_however_many_batches_wait_they_are_looked_at_in_as_many_statements(
    store: SqlStore,
) -> None:
    batch(store, "batch_0", "acme")
    limit(store, GROUP, Period.DAY)
    work = claim(store)
    assert work is not None
    record(store, work)  # half of the day's tokens
    statements: list[str] = []

    def note(_conn: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        statements.append(statement)

    event.listen(store._db._reader, "before_cursor_execute", note)
    counts = []
    for number in range(1, 4):
        made = batch(store, f"batch_{number}", "acme")
        store.note_batch_waits(made.batch_id, "it is noted once")
        assert next_batch(store) is None
        statements.clear()
        assert next_batch(store) is None
        counts.append(len(statements))
        waits = store.waiting_for_budget([f"job-batch_{n}" for n in range(number + 1)])
        assert len(waits) == number + 1
    assert len(set(counts)) == 1
    more = [*waits, *(f"no-job-{n}" for n in range(40_000))]  # SQLite takes 32,766 parameters
    assert store.waiting_for_budget(more) == waits
    assert list(store.jobs_of_ids(more)) == list(waits)


def test_a_batch_that_no_budget_covers_ends_with_the_limits_code(store: SqlStore) -> None:
    one = batch(store, "batch_1", "acme")
    limit(store, GROUP - 1)
    assert next_batch(store) == "batch_1", "it has to stop"
    assert store.stop_overdue() == {"job-batch_1"}
    lease = claim_job(store, Stage.PUBLISH, job_id="job-batch_1").lease
    store.finish_job(lease, JobState.CANCELLED)
    job = store.get_job("job-batch_1")
    assert why_stopped(one, job) is Stop.TENANT
    end = not_run(one, job)
    assert end.status is BatchStatus.CANCELLED
    assert end.errors[0]["code"] == "token_limit_exceeded"
    assert "budget of 63 tokens in all is spent" in end.errors[0]["message"]


def results_wait(store: SqlStore) -> None:
    """A batch of a tenant with a budget, whose runner was killed before it recorded a group."""
    batch(store, "batch_1", "acme")
    limit(store, 4 * GROUP, Period.DAY)
    store.advance(found(claim(store)).lease, Stage.RECORD, RESULTS, NO_TIME)


def runner_that_raises(
    store: SqlStore, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Runner:
    def raises(*_: object) -> None:
        raise error

    monkeypatch.setattr("specbatch.jobs.serve.runner.run_job", raises)
    monkeypatch.setattr("specbatch.jobs.serve.runner.spec_of", lambda _: None)
    monkeypatch.setattr("specbatch.jobs.serve.runner.is_away", lambda _: False)
    client = Client(store, lambda _: None, str(tmp_path))
    return Runner(Settings(workspace=str(tmp_path)), store, client, SERVICE)


def how_it_ended(store: SqlStore) -> tuple[BatchStatus, JobState]:
    ended = store.batch("acme", "batch_1")
    assert ended is not None
    (account,) = store.tenant_accounts()
    assert account.reserved_tokens == 0
    assert store.open_batches(SERVICE) == []
    return ended.status, store.get_job("job-batch_1").state


def test_a_batch_that_cannot_be_run_ends_with_its_job_while_results_wait(
    store: SqlStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results_wait(store)
    error = ModelChangedError("the model has other weights")
    assert runner_that_raises(store, error, tmp_path, monkeypatch).run_next()
    assert how_it_ended(store) == (BatchStatus.FAILED, JobState.FAILED)


def test_a_batch_that_was_passed_over_is_cancelled_with_its_job_while_results_wait(
    store: SqlStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results_wait(store)
    error = UsageError("another numeric class")
    one = runner_that_raises(store, error, tmp_path, monkeypatch)
    assert one.run_next()
    store.cancel_batch("acme", "batch_1")
    one.client.cancel("job-batch_1", CANCELLED)
    assert one.run_next()
    assert how_it_ended(store) == (BatchStatus.CANCELLED, JobState.CANCELLED)
