"""What a worker leaves to others, and when it asks the store again."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from contracts.shorthand import F32, claim, ingest, serving
from ledger.builders import JOB, RESULTS, Clock
from sqlalchemy import event

from specbatch.pipeline.runtime.placer import MOST_FRESH, REST, Placer
from specbatch.schemas.backlog import OpenJob
from specbatch.schemas.records import Stage, StageTiming
from specbatch.schemas.timekeeping import Device, NewSession
from support.databases import sqlite_store

PATIENCE_SEC = 600.0
FRESH_SEC = 5.0


class Bed:
    """A job of twenty groups, a dear worker that asks, and other workers that are alive."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = sqlite_store(self.clock)
        ingest(self.store, groups=20, numeric_class=F32)
        self.devices: dict[str, Device] = {}
        self.done = 0
        self.dear = self.announce("dear", 4_000_000)

    def announce(self, name: str, each: int | None, pool: str | None = None, **more: Any) -> Device:
        price = more.get("price", each or 200_000)
        device = Device("gpu", "eu", more.get("tenure", "reserved"), price, pool or name, each)
        self.store.begin_session(NewSession(name, name, device, 0, serving(F32)))
        return device

    def placer(self, **more: Any) -> Placer:
        values: dict[str, Any] = {"fresh_sec": 0.0, "clock": self.clock, **more}
        return Placer(self.store, self.dear, 1e9, PATIENCE_SEC, {}, **values)

    def verify_one(self) -> None:
        """A group of the job is done by somebody."""
        lease = claim(self.store, self.done, Stage.VERIFY).lease
        self.store.advance(lease, Stage.RECORD, RESULTS, StageTiming(8.0))
        self.done += 1


@pytest.fixture
def bed() -> Bed:
    return Bed()


def test_a_job_that_was_taken_by_patience_is_kept_for_as_long_again(bed: Bed) -> None:
    bed.announce("cheap", 1_000_000)  # alive, and idle
    placer = bed.placer()
    assert placer.jobs() == frozenset()
    bed.clock.advance(PATIENCE_SEC)
    for _ in range(10):
        assert placer.jobs() == {JOB}, "the own groups are no reason to leave it again"
        bed.verify_one()
        bed.clock.advance(PATIENCE_SEC / 10)
    assert placer.jobs() == frozenset(), "cheaper pools get another chance"
    bed.clock.advance(PATIENCE_SEC)
    assert placer.jobs() == {JOB}


def test_a_job_that_cheaper_pools_continue_is_never_overdue(bed: Bed) -> None:
    bed.announce("cheap", 1_000_000)
    placer = bed.placer()
    for _ in range(5):
        assert placer.jobs() == frozenset()
        bed.clock.advance(PATIENCE_SEC - 1)
        bed.verify_one()


@pytest.mark.parametrize(
    ("each", "pool", "tenure"),
    [
        (1_000_000, "dear", "reserved"),  # the same pool, though cheaper
        (1_000_000, "dear", "spot"),
        (None, "unknown", "reserved"),  # a price that nobody has said
        (4_000_000, "twin", "reserved"),
    ],
)
def test_all_jobs_are_anybody_s_where_no_other_pool_is_cheaper(
    bed: Bed, each: int | None, pool: str, tenure: str
) -> None:
    bed.announce("other", each, pool, tenure=tenure)
    assert bed.placer().jobs() is None


def test_devices_are_compared_one_by_one(bed: Bed) -> None:
    """Eight cheap devices that work as one cost more together than a dear one."""
    bed.announce("eight", 1_000_000, price=8_000_000)
    assert bed.placer().jobs() == frozenset()


def test_while_one_thread_reads_others_have_the_answer_before(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed.announce("cheap", 1_000_000)
    placer = bed.placer()
    assert placer.jobs() == frozenset()
    bed.clock.advance(PATIENCE_SEC)
    began, ends = threading.Event(), threading.Event()
    read = bed.store.open_jobs

    def slowly() -> list[OpenJob]:
        began.set()
        assert ends.wait(60)
        return read()

    monkeypatch.setattr(bed.store, "open_jobs", slowly)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(placer.jobs)
        try:
            assert began.wait(60)
            assert placer.jobs() == frozenset(), "as before, and without waiting"
        finally:
            ends.set()
        assert reading.result() == {JOB}
    assert placer.leaves(JOB) is False


@pytest.mark.parametrize(
    ("took", "holds"),
    [(0.0, FRESH_SEC), (1.0, REST), (100.0, MOST_FRESH * FRESH_SEC)],
)
def test_an_answer_holds_longer_where_reading_takes_long(
    bed: Bed, took: float, holds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed.announce("cheap", 1_000_000)
    reads = 0
    read = bed.store.open_jobs

    def slowly() -> list[OpenJob]:
        nonlocal reads
        reads += 1
        bed.clock.advance(took)
        return read()

    monkeypatch.setattr(bed.store, "open_jobs", slowly)
    placer = bed.placer(fresh_sec=FRESH_SEC)
    placer.jobs()
    bed.clock.advance(holds - 0.5)
    placer.jobs()
    assert reads == 1
    bed.clock.advance(0.5)
    placer.jobs()
    assert reads == 2


def test_jobs_are_found_by_the_index_of_live_ones(bed: Bed) -> None:
    """Past jobs and their groups may be many."""
    sent: list[tuple[str, Any]] = []

    def note(_conn: Any, _cursor: Any, statement: str, parameters: Any, *_rest: Any) -> None:
        if statement.startswith("SELECT"):
            sent.append((statement, parameters))

    event.listen(bed.store._db._reader, "before_cursor_execute", note)
    assert [job.pinned.job_id for job in bed.store.open_jobs()] == [JOB]
    event.remove(bed.store._db._reader, "before_cursor_execute", note)
    ((statement, parameters),) = sent
    with bed.store._db._reader.connect() as connection:
        steps = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
    plan = "\n".join(str(step.detail) for step in steps)
    assert "SCAN jobs USING INDEX ix_jobs_live" in plan, plan
    assert "SCAN groups" not in plan, plan
    assert plan.count("SCAN jobs") == 1, plan
