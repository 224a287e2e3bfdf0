"""Two tenants on one worker: who floods it, and was there first, does not hold the other up."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import create_engine, text

from specbatch.pipeline.bootstrap import make_client, make_store, make_worker
from specbatch.schemas.provenance import TICKS_PER_SEC, Ticks
from specbatch.schemas.records import JobState, Stage
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import load_spec
from specbatch.workers.lifecycle import embedded
from support.databases import migrated
from support.models import TinyPair

FEW, MANY = 12, 60  # groups
AT_ONCE = 4
TICKS = " + ".join(f"{kind}_ticks" for kind in Ticks.__slots__)
TAKEN = f"""
SELECT job_id, SUM({TICKS}) FROM groups JOIN time_slices USING (job_id, group_index)
WHERE time_slices.stage = 'verify' GROUP BY job_id, group_index ORDER BY ready_at
"""


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
    with embedded(settings, str(tiny_pair.verifier), None, store, concurrency=AT_ONCE):
        for job_id in jobs.values():
            *_, last = client.follow(job_id, 0.05, 240)
            assert last.state is JobState.DONE
    order = seconds_in_order(tmp_path / "work" / "specbatch.db")
    assert Counter(job_id for job_id, _ in order) == {jobs["flood"]: MANY, jobs["other"]: FEW}
    last_of_other = max(place for place, (job_id, _) in enumerate(order) if job_id == jobs["other"])
    taken = dict.fromkeys(jobs.values(), 0.0)
    for job_id, seconds in order[: last_of_other + 1]:
        taken[job_id] += seconds
    # By turns it is as much as the other's, and what was in hand at the beginning and the end.
    in_hand = 2 * AT_ONCE * max(seconds for _, seconds in order)
    assert taken[jobs["flood"]] <= taken[jobs["other"]] + in_hand, order


def seconds_in_order(database: Path) -> list[tuple[str, float]]:
    """The job and the device seconds of every group, in the order in which they were verified."""
    engine = create_engine(f"sqlite:///{database}")
    with engine.connect() as connection:
        found = connection.execute(text(TAKEN)).all()
    engine.dispose()
    return [(job_id, ticks / TICKS_PER_SEC) for job_id, ticks in found]
