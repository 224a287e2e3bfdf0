"""Jobs are read once per process for their groups, and anew for themselves."""

from __future__ import annotations

import pytest
from contracts.shorthand import claim_job
from ledger.builders import JOB, Clock, new_job

from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.stages.context import KnownJobs
from specbatch.schemas.errors import JobNotFoundError
from specbatch.schemas.records import JobRow, Stage
from specbatch.schemas.spec import load_spec
from support.databases import new_database

SPEC = load_spec({"input": {"uri": "/in"}, "output": {"uri": "/out"}, "verifier": "big"})


class Counting(SqlStore):
    """Counts its reads of jobs."""

    def __init__(self) -> None:
        super().__init__(new_database(), clock=Clock())
        self.read: list[str] = []

    def get_job(self, job_id: str) -> JobRow:
        self.read.append(job_id)
        return super().get_job(job_id)


@pytest.fixture
def store() -> Counting:
    opened = Counting()
    for job_id in (JOB, "jobother", "jobthird"):
        opened.create_job(new_job(job_id, spec=SPEC.model_dump(mode="json")))
    return opened


def test_groups_ask_the_store_once(store: Counting) -> None:
    jobs = KnownJobs(store)
    first = jobs.of_group(JOB)
    assert first[0].job_id == JOB
    assert first[1] == SPEC
    assert jobs.of_group(JOB) is first
    assert store.read == [JOB]


def test_the_job_itself_is_read_anew_and_not_kept(store: Counting) -> None:
    jobs = KnownJobs(store)
    jobs.fresh(JOB)  # as ingest does, before the report has what groups need
    store.request_cancel(JOB)
    assert jobs.of_group(JOB)[0].cancel_requested
    lease = claim_job(store, Stage.PUBLISH).lease
    store.note_report(lease, {"steps": 1})
    assert jobs.of_group(JOB)[0].report == {}
    assert jobs.fresh(JOB)[0].report == {"steps": 1}


def test_only_the_jobs_used_last_are_kept(store: Counting) -> None:
    jobs = KnownJobs(store, most=2)
    for job_id in (JOB, "jobother", JOB, "jobthird", JOB, "jobother"):
        jobs.of_group(job_id)
    assert store.read == [JOB, "jobother", "jobthird", "jobother"]


def test_a_job_that_is_not_there_is_not_remembered(store: Counting) -> None:
    jobs = KnownJobs(store)
    for _ in range(2):
        with pytest.raises(JobNotFoundError):
            jobs.of_group("nosuchjob")
    assert store.read == ["nosuchjob"] * 2
