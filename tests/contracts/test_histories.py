"""Files of earlier outputs go with the jobs that those are of, and with the job that drafts from
them; in every store."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from contracts.shorthand import ended, found
from ledger.builders import LEASE_SEC, NO_TIME, RESULTS, completion, new_group, new_job, position

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime.purge import Due, Purger
from specbatch.pipeline.stages.drafting import Drafting
from specbatch.pipeline.storage.history_files import HISTORY
from specbatch.pipeline.storage.objects import Objects, local_path
from specbatch.schemas.errors import ObjectError
from specbatch.schemas.records import JobRow, JobState, Stage
from specbatch.schemas.spec import load_spec

SPEC = load_spec({"input": {"uri": "/in"}, "output": {"uri": "/out"}, "verifier": "/big"})

Make = Callable[..., JobRow]


@pytest.fixture
def make(store: Store, tmp_path: Path) -> Make:
    """A job that drafts from what is there, and runs; or is done."""

    def making(job_id: str, done: bool = False, tenant: str = "clinic") -> JobRow:
        workspace = tmp_path / job_id
        store.create_job(new_job(job_id, tenant=tenant, workspace_uri=str(workspace)))
        lease = found(store.claim_job(job_id, Stage.INGEST, "w", LEASE_SEC)).lease
        spec = SPEC.model_copy(update={"tenant": tenant})
        Drafting(store, Objects()).prepare(lease, store.get_job(job_id), spec, "v")
        store.add_groups(lease, [new_group(0)], [], 4, position(4))
        store.finish_ingest(lease, 4, {})
        if done:
            for stage in (Stage.VERIFY, Stage.RECORD):
                lease = found(store.claim_group(job_id, 0, stage, "w", LEASE_SEC)).lease
                if stage is Stage.VERIFY:
                    store.advance(lease, Stage.RECORD, RESULTS, NO_TIME)
            store.commit_group(lease, [completion(row) for row in range(4)], NO_TIME, {})
            last = found(store.claim_job(job_id, Stage.PUBLISH, "w", LEASE_SEC))
            store.finish_job(last.lease, JobState.DONE)
        return store.get_job(job_id)

    return making


def files(folder: Path, job_id: str) -> list[str]:
    return sorted(path.name for path in (folder / job_id).glob("*"))


def unexpected(job: JobRow, error: ObjectError) -> None:
    raise AssertionError(job.job_id) from error


def test_what_was_purged_is_in_no_other_jobs_workspace(
    store: Store, make: Make, tmp_path: Path
) -> None:
    first = make("a-first", done=True)
    make("z-other", done=True, tenant="other")
    there = [make("b-done", done=True), make("c-runs"), make("z-runs", tenant="other")]
    for job in there:
        (name,) = files(tmp_path, job.job_id)
        assert name.startswith("history-1-")
        another, older = f"history-2{name.removeprefix('history-1')}", "history-2.bin"
        for name in ("prompts-0.arrow", another, older, f".{another}.f00.tmp"):
            (tmp_path / job.job_id / name).write_bytes(b"x")
    purger = Purger(store, Objects(), {})
    list(purger.purge(Due(first, "asked for")))
    assert purger.forget_past("clinic", {"a-first"}, unexpected)
    assert files(tmp_path, "b-done") == files(tmp_path, "c-runs") == ["prompts-0.arrow"]
    assert len(files(tmp_path, "z-runs")) == 5, "of another tenant"
    assert Drafting(store, Objects()).history(store.get_job("c-runs")) is None
    assert HISTORY in make("d-new").report, "what is left may be drafted from"
    drafted = Drafting(store, Objects()).history(store.get_job("d-new"))
    assert drafted is not None
    assert len(drafted) == 4


def test_who_cannot_be_reached_is_told_of(store: Store, make: Make, tmp_path: Path) -> None:
    make("a-first", done=True)
    make("b-runs")
    ended(store, "c-lost", tenant="clinic", workspace_uri=str(tmp_path / "elsewhere"))
    store.create_job(new_job("d-lost", tenant="clinic", workspace_uri=str(tmp_path / "elsewhere")))
    told: list[str] = []
    purger = Purger(store, Objects(), {})
    assert not purger.forget_past("clinic", (), lambda job, _: told.append(job.job_id))
    assert told == ["d-lost"], "the other one never drafted"
    assert files(tmp_path, "b-runs") == []


def test_a_job_that_has_ended_keeps_no_history(
    store: Store, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    make("a-first", done=True)
    job, drafting = make("b-done", done=True), Drafting(store, Objects())
    assert drafting.history(job) is not None
    for _ in range(2):
        drafting.forget(job)
        assert not local_path(job.report[HISTORY]["uri"]).exists()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert drafting.history(job) is None, "nor is it in memory: a retry goes on without"
