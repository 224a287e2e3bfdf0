"""Who locks a job and its groups locks the job first, so that two of them never deadlock."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from contracts.shorthand import claim, claim_job
from ledger.builders import JOB, LEASE_SEC, new_group, new_job, position
from sqlalchemy import Engine, literal, select, text, update

from specbatch.pipeline.ledger.sql import registry
from specbatch.pipeline.ledger.sql.databases import make_engine
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.schemas.records import Stage
from specbatch.schemas.registry import DeployScope, NewModel
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
