"""Worker processes that say that they are there, and what jobs lack of them: on both databases."""

from __future__ import annotations

from ledger.builders import Clock, new_job

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.presence import WorkerProcess

READER = WorkerProcess("1", "host:1", ("ingest",))
VERIFIER = WorkerProcess("2", "host:2", ("verify",), verifier="big")


def test_a_process_is_known_until_it_has_ended(store: Store, clock: Clock) -> None:
    store.report_process(VERIFIER, None)
    store.report_process(READER, "no broker")
    clock.now += 5.0
    store.report_process(READER, None)
    first, second = store.backlog().processes
    assert (first.process, first.age_sec, first.silent_sec, first.trouble) == (READER, 5, 0, None)
    assert (second.process, second.age_sec, second.silent_sec) == (VERIFIER, 5, 5)
    store.forget_process("1")
    store.forget_process("nobody")
    assert [one.process for one in store.backlog().processes] == [VERIFIER]


def test_silent_processes_are_forgotten(store: Store, clock: Clock) -> None:
    store.report_process(VERIFIER, None)
    clock.now += 10.0
    store.report_process(READER, None)
    assert store.forget_silent_processes(10.0) == 1
    assert [one.process for one in store.backlog().processes] == [READER]


def test_a_new_job_lacks_all_that_it_will_need(store: Store, clock: Clock) -> None:
    job, _ = store.create_job(new_job())
    words = store.backlog().waiting()[job.job_id]
    assert "reads inputs" in words
    assert f"with model `{job.verifier}`" in words
    assert "records groups" in words
    store.report_process(READER, None)
    assert "reads inputs" not in store.backlog().waiting()[job.job_id]
    store.report_process(READER, "no broker")
    assert "reads inputs" in store.backlog().waiting()[job.job_id]
    store.report_process(READER, None)
    clock.now += 60.0
    assert "reads inputs" in store.backlog().waiting(silence_sec=59.0)[job.job_id]
