"""A disk that refuses in the middle of a job: no group is at fault, and it resumes by itself."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specbatch.pipeline.bootstrap import make_client, make_store
from specbatch.pipeline.outputs.outputs import read_output
from specbatch.pipeline.runtime import outage
from specbatch.pipeline.storage.objects import LocalObjects
from specbatch.schemas.records import JobState
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import load_spec
from specbatch.workers.app import make_enqueue
from specbatch.workers.lifecycle import embedded
from support.databases import migrated
from support.models import TinyPair
from support.workers import wait_until

ROWS = 12


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        pytest.param("results-", errno.ENOSPC, id="full-results"),
        pytest.param("manifest", errno.EROFS, id="read-only-manifest"),
        # Full disks of processes are in tests/nothing_false; these differ in where it happens.
        pytest.param("prompts-", errno.EROFS, id="read-only-prompts", marks=pytest.mark.long),
        pytest.param("part-", errno.ENOSPC, id="full-part", marks=pytest.mark.long),
    ],
)
def test_a_job_whose_disk_refuses_waits_and_resumes_by_itself(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, number: int
) -> None:
    prompts = pa.table({"prompt": [f"def f{i}(x):" for i in range(ROWS)]})
    pq.write_table(prompts, tmp_path / "prompts.parquet")
    spec = load_spec(
        {
            "input": {"uri": str(tmp_path / "prompts.parquet")},
            "output": {"uri": str(tmp_path / "out")},
            "verifier": str(tiny_pair.verifier),
            "proposer": None,
            "sampling": {"max_tokens": 4},
            "group_size": 4,
        }
    )
    conf = Settings(
        broker_url="memory://localhost/",
        workspace=str(tmp_path / "workspace"),
        max_attempts=1,  # one that were lost would fail its group
        sweep_interval_sec=0.2,
        message_patience_sec=0.5,
    )
    migrated(tmp_path / "workspace" / "specbatch.db")
    store = make_store(conf)
    monkeypatch.setattr(outage, "FIRST_SEC", 0.05)  # until the first retry; later waits double
    temporary, refused = LocalObjects._temporary, []

    def refuse(self: LocalObjects, path: Path, source: Any) -> Any:
        if path.name.startswith((kind, "probe-")):
            refused.append(path)
            raise OSError(number, os.strerror(number), str(path))
        return temporary(self, path, source)

    with embedded(conf, str(tiny_pair.verifier), None, store, concurrency=2) as (app, _):
        client = make_client(conf, make_enqueue(app), store)

        with monkeypatch.context() as patch:
            patch.setattr(LocalObjects, "_temporary", refuse)
            job, _ = client.submit(spec)
            wait_until("several tries", lambda: len(refused) > 3)
            assert not client.job(job.job_id).state.is_final
            assert store.failed_groups(job.job_id) == []
        assert list(client.follow(job.job_id, 0.02, 240))[-1].state is JobState.DONE
    assert not list(tmp_path.rglob("*.tmp"))
    assert not list((tmp_path / "workspace").rglob("probe-*"))
    table = read_output(str(tmp_path / "out"))
    assert table["row_index"].to_pylist() == list(range(ROWS))
    assert table["error"].null_count == ROWS
