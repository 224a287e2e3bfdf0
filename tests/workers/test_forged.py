"""Forged, replayed and mutated messages at a worker's tasks: nothing changes, nothing leaks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from celery import Celery
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from specbatch.pipeline.bootstrap import Worker, make_client, make_worker
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.schemas.errors import UsageError
from specbatch.schemas.records import Artefact, JobState, Lease, Stage, StageTiming
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec, load_spec
from specbatch.workers.app import make_app, make_enqueue
from specbatch.workers.guard import WORK_TASK
from specbatch.workers.lifecycle import embedded
from specbatch.workers.tasks import register
from support.databases import sqlite_store
from support.models import TinyPair

pytestmark = pytest.mark.pipeline  # starts processes

ROWS, GROUP = 12, 4
NO_TIME = StageTiming(0.0)


@dataclass
class Scene:
    """Three jobs: one done, one whose groups are held elsewhere, one that a worker may go on with
    once it is asked rightly. `deliver` is a message that reaches the task."""

    home: Path
    store: SqlStore
    app: Celery
    worker: Worker
    done: str
    held: str
    leases: list[Lease]

    def deliver(self, fields: dict[str, Any]) -> None:
        with suppress(UsageError):  # for an engine that this worker does not have
            self.app.tasks[WORK_TASK](**fields)

    def looks(self) -> tuple[Any, ...]:
        """All that the store and the disk have."""
        jobs = sorted(self.store.list_jobs(), key=lambda job: job.job_id)
        rows = [
            (job, self.store.progress(job.job_id), list(self.store.completions(job.job_id)))
            for job in jobs
        ]
        files = {
            str(path): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(self.home.rglob("*"))
            if path.is_file()
        }
        lost = self.store.heartbeat(self.leases, 3600.0).lost
        return rows, self.store.due(), files, lost


def spec_of(home: Path, pair: TinyPair, name: str) -> JobSpec:
    prompts = [f"def f{i}(x):" for i in range(ROWS)]
    pq.write_table(pa.table({"prompt": prompts}), home / "prompts.parquet")
    values = {
        "input": {"uri": str(home / "prompts.parquet")},
        "output": {"uri": str(home / name)},
        "verifier": str(pair.verifier),
        "proposer": None,
        "sampling": {"max_tokens": 4},
        "group_size": GROUP,
    }
    return load_spec(values)


@pytest.fixture(scope="module")
def scene(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    home = tmp_path_factory.mktemp("scene")
    conf = Settings(broker_url="memory://localhost/", workspace=str(home / "workspace"))
    store = sqlite_store()
    with embedded(conf, str(tiny_pair.verifier), None, store, concurrency=2) as (app, _):
        client = make_client(conf, make_enqueue(app), store)
        job, _ = client.submit(spec_of(home, tiny_pair, "done"))
        assert list(client.follow(job.job_id, 0.02, 240))[-1].state is JobState.DONE
    app = make_app(conf)
    worker = make_worker(conf, ("ingest", "record"), lambda _: None, store=store)
    register(app, worker, lambda _: None)
    held, _ = make_client(conf, lambda _: None, store).submit(spec_of(home, tiny_pair, "held"))
    worker.run(Stage.INGEST, held.job_id, None)
    leases = []
    for index in range(ROWS // GROUP):
        work = store.claim_group(held.job_id, index, Stage.VERIFY, "elsewhere", 3600.0)
        assert work is not None
        leases.append(work.lease)
    yield Scene(home, store, app, worker, job.job_id, held.job_id, leases)
    worker.lease_keeper.close()


STAGES = [stage.value for stage in Stage]


def test_every_message_of_a_job_that_is_done_or_held_may_come_again(scene: Scene) -> None:
    before = scene.looks()
    for job_id in (scene.done, scene.held, "0" * 21):
        for stage in STAGES:
            for index in (None, 0, 1, 2, 3, 2**31 - 1):
                fields = {"job_id": job_id, "stage": stage, "group_index": index}
                scene.deliver(fields)
                scene.deliver(fields)
    assert scene.looks() == before


ANY = st.none() | st.integers() | st.text(max_size=12) | st.lists(st.integers(), max_size=3)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_mutated_message_changes_nothing(scene: Scene, data: st.DataObject) -> None:
    fields: dict[str, Any] = {
        "job_id": data.draw(st.sampled_from([scene.done, scene.held])),
        "stage": data.draw(st.sampled_from(STAGES)),
        "group_index": data.draw(st.none() | st.integers(0, 4)),
    }
    for name in data.draw(st.lists(st.sampled_from([*fields, "path", "uri", "owner"]), max_size=3)):
        fields[name] = data.draw(ANY)
    before = scene.looks()
    with suppress(ValidationError):
        scene.deliver(fields)
    assert scene.looks() == before


def test_a_row_that_names_a_foreign_file_is_not_followed(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    """Results of another job, with their right checksum, are not committed into this one."""
    conf = Settings(broker_url="memory://localhost/", workspace=str(tmp_path / "workspace"))
    store = sqlite_store()
    worker = make_worker(conf, ("ingest", "record"), lambda _: None, store=store)
    client = make_client(conf, lambda _: None, store)
    job, _ = client.submit(spec_of(tmp_path, tiny_pair, "out"))
    worker.run(Stage.INGEST, job.job_id, None)
    foreign = tmp_path / "workspace" / "jobs" / "another" / "results-00000000-1.arrow"
    foreign.parent.mkdir()
    foreign.write_bytes(b"of somebody else")
    digest = hashlib.sha256(foreign.read_bytes()).hexdigest()
    artefact = Artefact(str(foreign), digest, foreign.stat().st_size)
    work = store.claim_group(job.job_id, 0, Stage.VERIFY, "forger", 60.0)
    assert work is not None
    store.advance(work.lease, Stage.RECORD, artefact, NO_TIME)
    for _ in range(3):
        worker.run(Stage.RECORD, job.job_id, 0)
    assert list(store.completions(job.job_id)) == []
    [(index, word, _, error)] = store.failed_groups(job.job_id)
    assert (index, word) == (0, "failed")
    assert f"names the file {foreign}, which is not in its workspace" in error
    worker.lease_keeper.close()
