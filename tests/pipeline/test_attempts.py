"""What an attempt does when it fails, and what becomes of the unit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from contracts.shorthand import claim, ingest
from ledger.builders import JOB, LEASE_SEC

from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.runtime.leases import LeaseKeeper
from specbatch.pipeline.stages.attempt import attempt
from specbatch.schemas.errors import ModelChangedError, RequestCancelledError
from specbatch.schemas.records import DueWork, Stage
from support.databases import sqlite_store
from support.stage_context import stage_context

PUBLISH = DueWork(JOB, Stage.PUBLISH, None, priority=1)


@pytest.fixture
def store() -> SqlStore:
    return sqlite_store()


@pytest.fixture
def lease_keeper(store: SqlStore) -> Iterator[LeaseKeeper]:
    lease_keeper = LeaseKeeper(store, LEASE_SEC)
    yield lease_keeper
    lease_keeper.close()


@pytest.mark.parametrize(
    "error", [ModelChangedError("it has other files"), RequestCancelledError("the worker ends")]
)
def test_the_last_group_of_a_stopped_job_has_it_published_at_once(
    store: SqlStore, lease_keeper: LeaseKeeper, error: Exception
) -> None:
    ingest(store, groups=1)
    work, sent = claim(store, 0), list[DueWork]()
    store.request_cancel(JOB)
    with attempt(stage_context(store, lease_keeper, sent.append, LEASE_SEC), work.lease):
        raise error
    assert store.get_job(JOB).stage is Stage.PUBLISH
    assert sent == [PUBLISH]


def test_a_publication_that_fails_is_not_enqueued_at_once(
    store: SqlStore, lease_keeper: LeaseKeeper
) -> None:
    ingest(store, groups=0)
    work, sent = store.claim_job(JOB, Stage.PUBLISH, "me", LEASE_SEC), list[DueWork]()
    assert work is not None
    with attempt(stage_context(store, lease_keeper, sent.append, LEASE_SEC), work.lease):
        raise ModelChangedError("it has other files")
    assert store.get_job(JOB).stage is Stage.PUBLISH
    assert sent == []
