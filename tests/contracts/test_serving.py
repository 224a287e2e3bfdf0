"""Files, batches and API keys of `specbatch serve`, on both databases."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from contracts.shorthand import ended, ingest
from ledger.builders import START, Clock

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import IdempotencyError, InUseError
from specbatch.schemas.records import JobState
from specbatch.schemas.serving import (
    ApiKey,
    BatchEnd,
    BatchPhase,
    BatchStatus,
    NewBatch,
    NoSuchFileError,
    Page,
    Purpose,
    Scope,
    StoredFile,
    TenantUse,
    TooManyOpenError,
)

FILE = StoredFile("file-1", "a", Purpose.BATCH, "na\0me\ud800", 1 << 40, "f" * 64, "here")
BATCH = NewBatch(
    *("batch_1", "a", "/v1/chat/completions", "file-1", "24h", 86_400.0, "digest", "here"),
    metadata={"k": "v"},
)
OUTPUT = StoredFile("file-2", "a", Purpose.OUTPUT, "output", 7, "e" * 64, "here")


def test_a_file_is_its_tenants_alone(store: Store) -> None:
    added = store.add_file(FILE)
    assert added == replace(FILE, created_at=START)
    assert store.file("a", "file-1") == added
    assert store.file("b", "file-1") is None
    assert store.files("b", Page(10)) == []
    assert not store.delete_file("b", "file-1")
    assert store.delete_file("a", "file-1")
    assert store.file_ids("here") == set()


def test_lists_are_pages_in_both_directions(store: Store) -> None:
    for number in range(4):
        store.add_file(replace(FILE, file_id=f"file-{number}"))
    first = store.files("a", Page(2))
    assert [file.file_id for file in first] == ["file-3", "file-2"]
    assert [f.file_id for f in store.files("a", Page(9, "file-2"))] == ["file-1", "file-0"]
    assert [f.file_id for f in store.files("a", Page(9, "file-2", False))] == ["file-3"]
    assert store.files("a", Page(9), Purpose.OUTPUT) == []


def test_a_batch_goes_from_new_to_its_end(store: Store, clock: Clock) -> None:
    store.add_file(FILE)
    new, created = store.add_batch(BATCH, 10)
    assert created
    assert (new.phase, new.metadata, new.expires_at) == (
        BatchPhase.NEW, {"k": "v"}, START + 86_400
    )  # fmt: skip
    clock.advance(1)
    begun = store.begin_batch("batch_1", "small", 3)
    assert (begun.phase, begun.requests, begun.in_progress_at) == (
        BatchPhase.RUNNING, 3, START + 1
    )  # fmt: skip
    assert store.note_batch_job("batch_1", "job-1").job_id == "job-1"
    end = BatchEnd(BatchStatus.COMPLETED, 2, 1, OUTPUT, errors=({"code": "x", "line": 1},))
    ended = store.end_batch("batch_1", end)
    assert (ended.status, ended.output_file_id, ended.error_file_id) == (
        BatchStatus.COMPLETED, "file-2", None
    )  # fmt: skip
    assert ended.errors == ({"code": "x", "line": 1},)
    other = replace(OUTPUT, file_id="file-3")
    assert store.end_batch("batch_1", BatchEnd(BatchStatus.FAILED, output=other)) == ended
    assert store.file_ids("here") == {"file-1", "file-2"}  # the second end added none
    assert store.open_batches("here") == []
    assert store.begin_batch("batch_1", "large", 9) == ended


def test_a_batch_that_has_not_begun_is_cancelled_at_once(store: Store) -> None:
    store.add_file(FILE)
    store.add_batch(BATCH, 10)
    assert store.cancel_batch("b", "batch_1") is None
    cancelled = store.cancel_batch("a", "batch_1")
    assert cancelled is not None
    assert cancelled.status is BatchStatus.CANCELLED
    assert store.begin_batch("batch_1", "small", 1) == cancelled
    store.add_batch(replace(BATCH, batch_id="batch_2"), 10)
    store.begin_batch("batch_2", "small", 1)
    asked = store.cancel_batch("a", "batch_2")
    assert asked is not None
    assert (asked.status, asked.cancelling_at) == (None, START)


def test_a_key_makes_one_batch_whoever_asks_at_once(store: Store) -> None:
    store.add_file(FILE)
    store.add_file(replace(FILE, file_id="file-9", tenant="b"))
    orders = [replace(BATCH, batch_id=f"batch_{i}", idempotency_key="night") for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        made = list(pool.map(lambda order: store.add_batch(order, 10), orders))
    assert len({batch.batch_id for batch, _ in made}) == 1
    assert sum(created for _, created in made) == 1
    with pytest.raises(IdempotencyError, match="another request"):
        store.add_batch(replace(orders[0], digest="other"), 10)
    others = replace(orders[0], batch_id="batch_b", tenant="b", input_file_id="file-9")
    assert store.add_batch(others, 10)[1]


def test_what_a_batch_needs_and_what_it_keeps(store: Store) -> None:
    with pytest.raises(NoSuchFileError, match="file-1"):
        store.add_batch(BATCH, 10)
    store.add_file(FILE)
    with pytest.raises(NoSuchFileError):
        store.add_batch(replace(BATCH, tenant="b"), 10)
    store.add_batch(BATCH, 1)
    with pytest.raises(TooManyOpenError, match="1 batches are open"):
        store.add_batch(replace(BATCH, batch_id="batch_2"), 1)
    with pytest.raises(InUseError, match="batch_1"):
        store.delete_file("a", "file-1")
    store.end_batch("batch_1", BatchEnd(BatchStatus.FAILED))
    assert store.delete_file("a", "file-1")
    assert [batch.batch_id for batch in store.batches("a", Page(5))] == ["batch_1"]
    assert store.batches("b", Page(5)) == []


def test_a_service_sees_only_its_own_open_batches_and_files(store: Store) -> None:
    store.add_file(FILE)
    store.add_batch(BATCH, 10)
    assert store.open_batches("there") == []
    assert store.file_ids("there") == set()
    with pytest.raises(NoSuchFileError, match="in the folder of another service"):
        store.add_batch(replace(BATCH, batch_id="batch_2", service_id="there"), 10)


def test_the_batch_that_made_a_file_is_found(store: Store) -> None:
    store.add_file(FILE)
    store.add_batch(BATCH, 10)
    waiting = store.note_batch_waits("batch_1", "another machine")
    assert waiting.waits_because == "another machine"
    ended = store.end_batch("batch_1", BatchEnd(BatchStatus.COMPLETED, output=OUTPUT))
    assert ended.waits_because is None
    assert store.batch_of_file("a", OUTPUT.file_id) == ended
    assert store.batch_of_file("b", OUTPUT.file_id) is None
    assert store.batch_of_file("a", FILE.file_id) is None


def test_keys_expire_and_are_revoked_once(store: Store, clock: Clock) -> None:
    key = ApiKey("k", "name", "a", frozenset([Scope.READ]), b"d" * 32, expires_at=START + 5)
    assert store.add_api_key(key) == replace(key, created_at=START)
    found = store.api_key("k")
    assert found is not None
    assert (found[0].why_not(found[1]), found[1]) == (None, START)
    assert store.api_key("other") is None
    clock.advance(5)
    found = store.api_key("k")
    assert found is not None
    assert found[0].why_not(found[1]) == "expired"
    revoked = store.revoke_api_key("k")
    assert revoked is not None
    clock.advance(5)
    assert store.revoke_api_key("k") == revoked
    assert store.revoke_api_key("other") is None
    assert store.api_keys() == ([revoked], START + 10)


def test_a_tenant_finds_its_own_jobs_alone(store: Store) -> None:
    for number, tenant in enumerate("aab"):
        started(store, f"job{number:05}", tenant)
    ids = [job.job_id for job in store.tenant_jobs("a", Page(9))]
    assert ids == ["job00001", "job00000"]
    assert [j.job_id for j in store.tenant_jobs("a", Page(9, "job00001"))] == ["job00000"]
    assert store.tenant_jobs("a", Page(9), JobState.DONE) == []
    assert store.tenant_job("a", "job00001") == store.get_job("job00001")
    for other in ("job00002", "job0000", "latest", "nightly"):
        assert store.tenant_job("a", other) is None
    assert store.tenant_states("a") == {JobState.RUNNING: 2}
    assert store.tenant_states("nobody") == {}


def test_a_tenants_use_is_what_its_groups_recorded_since_then(store: Store, clock: Clock) -> None:
    assert store.tenant_use("default") == TenantUse(0, 0, 0, 0, 0.0)
    ended(store, "job00000", tenant="default")
    ended(store, "job00001", tenant="other")
    clock.advance(100.0)
    ended(store, "job00002", tenant="default")
    started(store, "job00003", "default")
    one = store.progress("job00000")
    each = (one.completions, 20, one.completion_tokens, one.cost_usd)
    assert store.tenant_use("default") == TenantUse(3, *(2 * value for value in each))
    assert store.tenant_use("default", START + 1) == TenantUse(2, *each)
    assert store.tenant_use("default", START + 101) == TenantUse(0, 0, 0, 0, 0.0)


def started(store: Store, job_id: str, tenant: str) -> None:
    ingest(store, 1, job_id=job_id, tenant=tenant)
