"""A claim and a move of its job to another class at the same moment: no group is held in both."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from contracts.shorthand import F32, TORCH, ingest, serving
from ledger.builders import JOB, LEASE_SEC, NO_TIME, RESULTS
from ledger.test_lock_order import until_somebody_waits

from specbatch.pipeline.ledger.sql import claim_next, leases, pinning
from specbatch.pipeline.ledger.sql.databases import make_engine
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.pipeline.ledger.sql.transactions import SERVER_TIME
from specbatch.schemas.errors import FencedError
from specbatch.schemas.numeric_class import Change
from specbatch.schemas.records import Stage


@pytest.mark.parametrize("by_turn", [False, True])
def test_a_move_waits_for_a_claim_and_fences_it(postgres_url: str, by_turn: bool) -> None:
    store, other = open_store(postgres_url), make_engine(postgres_url)
    ingest(store, groups=1, numeric_class=F32)
    claimer = leases.Claimer(Stage.VERIFY, "w", LEASE_SEC, 3, serving(F32))
    with ThreadPoolExecutor(1) as pool:
        with other.begin() as conn:
            if by_turn:
                work = claim_next.claim_next(conn, SERVER_TIME, claimer, "big", {})
            else:
                work = leases.claim_group(conn, SERVER_TIME, claimer, JOB, 0)
            moved = pool.submit(store.retry_job, JOB, numeric_class=TORCH)
            until_somebody_waits(other)
        assert moved.result(60) == 1
    assert work is not None
    with pytest.raises(FencedError):
        store.advance(work.lease, Stage.RECORD, RESULTS, NO_TIME)
    store.close()
    other.dispose()


def test_a_claim_that_waited_for_a_move_gets_nothing(postgres_url: str) -> None:
    store, other = open_store(postgres_url), make_engine(postgres_url)
    ingest(store, groups=1, numeric_class=F32)
    with ThreadPoolExecutor(1) as pool:
        with other.begin() as conn:
            pinning.move(conn, SERVER_TIME, JOB, Change(TORCH))
            where = (JOB, 0, Stage.VERIFY, "w", LEASE_SEC)
            claimed = pool.submit(store.claim_group, *where, serving(F32))
            until_somebody_waits(other)
        assert claimed.result(60) is None
    assert store.claim_group(JOB, 0, Stage.VERIFY, "w", LEASE_SEC, serving(TORCH)) is not None
    store.close()
    other.dispose()
