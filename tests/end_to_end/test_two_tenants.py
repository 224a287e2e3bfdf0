"""Two tenants on one worker: who floods it, and was there first, does not hold the other up."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import create_engine, text

from specbatch.pipeline.bootstrap import make_client, make_store, make_worker
from specbatch.schemas.records import JobState, Stage
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import load_spec
from specbatch.workers.lifecycle import embedded
from support.databases import migrated
from support.models import TinyPair

FEW, MANY = 12, 60  # groups


def test_a_flood_of_one_tenant_leaves_the_other_its_share(
    tmp_path: Path, tiny_pair: TinyPair
) -> None:
    settings = Settings(workspace=str(tmp_path / "work"), broker_url="memory://localhost/")
    migrated(tmp_path / "work" / "specbatch.db")
    store = make_store(settings)
    client = make_client(settings, lambda _work: None, store)  # the worker's sweeper enqueues
    jobs = {}
    for tenant, groups in (("flood", MANY), ("other", FEW)):
        prompts = [f"{tenant} {i}" for i in range(2 * groups)]
        pq.write_table(pa.table({"prompt": prompts}), tmp_path / f"{tenant}.parquet")
        spec = load_spec(
            {
                "tenant": tenant,
                "input": {"uri": str(tmp_path / f"{tenant}.parquet")},
                "output": {"uri": str(tmp_path / tenant)},
                "verifier": str(tiny_pair.verifier),
                "sampling": {"max_tokens": 4},
                "speculation": {"depth": "off"},
                "group_size": 2,
            }
        )
        jobs[tenant] = client.submit(spec)[0].job_id
    reader = make_worker(settings, ("ingest",), lambda _work: None)
    for job_id in jobs.values():  # both before anything is verified: nobody is there too late
        reader.run(Stage.INGEST, job_id, None)
    reader.lease_keeper.close()
    reader.store.close()
    with embedded(settings, str(tiny_pair.verifier), None, store, concurrency=4):
        for job_id in jobs.values():
            *_, last = client.follow(job_id, 0.05, 240)
            assert last.state is JobState.DONE
    engine = create_engine(f"sqlite:///{tmp_path}/work/specbatch.db")
    query = text("SELECT job_id FROM groups ORDER BY ready_at")  # of a group that is done: when
    with engine.connect() as connection:
        order = [row.job_id for row in connection.execute(query)]
    engine.dispose()
    assert len(order) == MANY + FEW
    last_of_other = max(place for place, job_id in enumerate(order) if job_id == jobs["other"])
    before = order[:last_of_other].count(jobs["flood"])
    # By turns it is as many as the other's, and what was in hand meanwhile.
    assert before < MANY / 2, order
