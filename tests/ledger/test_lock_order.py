"""Who locks a job and its groups locks the job first, so that two of them never deadlock."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from contracts.shorthand import claim, claim_job
from contracts.test_budgets import GROUP, ingest, limit
from ledger.builders import JOB, LEASE_SEC, new_group, new_job, position
from sqlalchemy import Engine, event, literal, select, text, update

from specbatch.pipeline.ledger.sql import budgets, registry, serving
from specbatch.pipeline.ledger.sql.databases import make_engine
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.schemas.records import Stage
from specbatch.schemas.registry import DeployScope, NewModel
from specbatch.schemas.serving import NewBatch, Purpose, StoredFile, TooManyOpenError
from specbatch.schemas.tables import Group, Job, Rollout

_WAITING = text(
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND wait_event_type = 'Lock'"
)


def test_a_heartbeat_that_waits_for_a_job_holds_none_of_its_groups(postgres_url: str) -> None:
    store, other = open_store(postgres_url), make_engine(postgres_url)
    store.create_job(new_job())
    ingest = claim_job(store, Stage.INGEST).lease
    store.add_groups(ingest, [new_group(0)], [], 4, position(4))
    leases = [claim(store, 0).lease, ingest]
    job = select(Job.job_id).where(Job.job_id == JOB).with_for_update()
    group = select(Group.group_index).where(Group.job_id == JOB).with_for_update(nowait=True)
    with ThreadPoolExecutor(1) as pool:
        with other.begin() as conn:
            conn.execute(job)
            beat = pool.submit(store.heartbeat, leases, LEASE_SEC)
            until_somebody_waits(other)
            assert conn.scalar(group) == 0
        assert beat.result(60) == (set(), set(), set())
    store.close()
    other.dispose()


def until_somebody_waits(engine: Engine) -> None:
    deadline = time.monotonic() + 60
    with engine.connect() as conn:
        while not conn.scalar(_WAITING):
            conn.rollback()  # a transaction sees the same activity for as long as it lasts
            assert time.monotonic() < deadline, "nobody waits for a lock"


def test_locks_of_several_tenants_are_taken_in_one_order(postgres_url: str) -> None:
    store, other = open_store(postgres_url), make_engine(postgres_url)
    by_key = text("SELECT name FROM unnest(CAST(:names AS text[])) AS name ORDER BY hashtext(name)")
    is_free = text("SELECT pg_try_advisory_xact_lock(:of_budgets, hashtext(:name))")
    with other.begin() as conn:
        first, second = conn.scalars(by_key, {"names": ["acme", "else"]})

    def lock_both() -> None:
        with other.begin() as conn:
            budgets.lock(conn, second, first)

    with ThreadPoolExecutor(1) as pool:
        with other.begin() as conn:
            budgets.lock(conn, first)
            waiting = pool.submit(lock_both)
            until_somebody_waits(other)
            name = {"of_budgets": budgets._OF_BUDGETS, "name": second}
            assert conn.scalar(is_free, name), "it took the second one before the first"
        waiting.result(60)
    store.close()
    other.dispose()


def test_a_claim_takes_the_locks_of_all_its_tenants_at_once(postgres_url: str) -> None:
    store = open_store(postgres_url)
    for tenant in ("else", "acme"):
        ingest(store, f"job-{tenant}", tenant, groups=1)
        limit(store, GROUP, tenant=tenant)
    taken: list[list[str]] = []

    def note(_conn: Any, _cursor: Any, statement: str, parameters: Any, *_rest: Any) -> None:
        if "pg_advisory_xact_lock" in statement:
            taken.append(sorted(parameters["tenants"]))

    event.listen(store._db._reader, "before_cursor_execute", note)
    assert store.claim_next(Stage.VERIFY, "big", "w", LEASE_SEC) is not None
    assert taken == [["acme", "else"]]
    store.close()


def test_batches_that_are_made_at_once_are_no_more_than_a_tenant_may_have(
    postgres_url: str,
) -> None:
    store, other = open_store(postgres_url), make_engine(postgres_url)
    orders = []
    for name in ("a", "b"):
        file = StoredFile(f"file-{name}", "acme", Purpose.BATCH, name, 1, "f" * 64, "here")
        store.add_file(file)
        ask = (name, "acme", "/v1/completions", file.file_id, "24h", 86_400.0, "digest", "here")
        orders.append(NewBatch(*ask))
    with ThreadPoolExecutor(1) as pool:
        with other.begin() as conn:
            assert serving.add_batch(conn, literal(1.0), orders[0], 1)[1]
            waiting = pool.submit(store.add_batch, orders[1], 1)
            until_somebody_waits(other)
        with pytest.raises(TooManyOpenError):
            waiting.result(60)
    store.close()
    other.dispose()


def test_a_rollout_that_begins_beside_a_promotion_is_compared_with_what_serves(
    postgres_url: str,
) -> None:
    """And settling, which locks rollouts first, waits for the promotion before it locks any."""
    store, other = open_store(postgres_url), make_engine(postgres_url)
    for fingerprint in ("aa", "bb", "cc"):
        store.add_model(NewModel(fingerprint, "docs", f"/models/{fingerprint}"))
    store.promote("aa", DeployScope(), "the first")
    with ThreadPoolExecutor(1) as pool:
        with other.begin() as conn:
            registry.promote(conn, literal(1.0), "cc", DeployScope(), "by hand")
            beginning = pool.submit(store.begin_rollout, "bb", DeployScope(), (0.5, 1.0), "new")
            until_somebody_waits(other)
        assert beginning.result(60).present == "cc"
    with other.begin() as conn:  # as an older version could leave it
        conn.execute(update(Rollout).values(present="aa"))
    (settled,) = store.settle_rollouts()
    assert settled.end_reason == "the model that it was compared with serves no more"
    assert store.rollouts() == []
    store.close()
    other.dispose()
