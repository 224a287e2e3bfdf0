"""An idle verifier takes over what a busy one has not begun: the same outputs, each row once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from contracts.shorthand import claim, found, ingest
from ledger.builders import JOB, LEASE_SEC, NO_TIME, RESULTS, Clock

from specbatch.jobs.chaos.stand_in import StandInEngine
from specbatch.pipeline.engines.contract import Completion
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.engines.service import EngineService
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.runtime.leases import LeaseKeeper
from specbatch.pipeline.runtime.work_stealing import WorkStealer
from specbatch.pipeline.stages.dispatch import run_stage
from specbatch.pipeline.stages.verify import verify
from specbatch.schemas.errors import StoreError
from specbatch.schemas.records import FIRST_SPLIT_INDEX, JobState, Stage
from support.databases import sqlite_store
from support.stand_ins import Outcome, Site

ROWS = 64
AT_ONCE = 4  # sequences that the busy engine runs
PROMPTS = [f"prompt number {i}" for i in range(ROWS)]
WAIT_SEC = 60.0
MANY = 100_000  # steps


class Reined(StandInEngine):
    """Takes a step when it is let, and says when it waits for that."""

    def __init__(self, vocab_size: int, context_tokens: int, model: bytes) -> None:
        super().__init__(vocab_size, context_tokens, AT_ONCE, model=model)
        self.steps_allowed = threading.Semaphore(0)
        self.waits = threading.Semaphore(0)

    def step(self) -> list[Completion]:
        self.waits.release()
        assert self.steps_allowed.acquire(timeout=WAIT_SEC)
        return super().step()


class Busy:
    """A worker in a thread of its own, in the middle of group 0."""

    def __init__(self, site: Site, job_id: str) -> None:
        model = inspect_model(site.model)
        host: Any = site.host()
        self.engine = Reined(model.vocab_size, model.context_tokens, host.load())
        self.service = EngineService(lambda: self.engine)
        host.service = lambda _: self.service
        self.lease_keeper = site.lease_keeper()
        self.context = site.worker("busy", host, self.lease_keeper)
        self.thread = threading.Thread(target=verify, args=(self.context, job_id, 0), daemon=True)

    def begin(self) -> None:
        """Group 0 is in the engine, its first rows have their first tokens."""
        self.thread.start()
        assert self.engine.waits.acquire(timeout=WAIT_SEC)
        self.engine.steps_allowed.release()
        assert self.engine.waits.acquire(timeout=WAIT_SEC)

    def go_on(self) -> None:
        """One step more: what was asked meanwhile is heard before the next."""
        self.engine.steps_allowed.release()
        assert self.engine.waits.acquire(timeout=WAIT_SEC)

    def end(self) -> None:
        self.engine.steps_allowed.release(MANY)
        self.thread.join(WAIT_SEC)
        assert not self.thread.is_alive()

    def close(self) -> None:
        self.engine.steps_allowed.release(MANY)
        self.service.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The same job in one worker."""
    site = Site(tmp_path_factory.mktemp("undisturbed"))
    job_id = site.submit(PROMPTS, n=2)
    site.work(site.worker("w", site.host()))
    outcome = site.outcome(job_id)
    site.close()
    return outcome


@pytest.fixture
def busy(site: Site) -> Iterator[Busy]:
    """A job of one group with two samples a row, that a worker has just begun."""
    job_id = site.submit(PROMPTS, n=2)
    run_stage(site.worker("reader", site.host()), Stage.INGEST, job_id, None)
    busy = Busy(site, job_id)
    busy.begin()
    yield busy
    busy.close()


def job_of(site: Site) -> str:
    return site.store.list_jobs()[0].job_id


def cuts(site: Site) -> int:
    return site.store.progress(job_of(site)).groups_total - 1


def wait_for_cut(site: Site) -> None:
    """Until the first group is cut off."""
    looked = threading.Event()
    for _ in range(int(WAIT_SEC / 0.01)):
        if cuts(site):
            return
        looked.wait(0.01)
    raise AssertionError("nothing was cut off")


def test_an_idle_worker_takes_half_of_what_a_busy_one_has_not_begun(
    site: Site, busy: Busy, undisturbed: Outcome
) -> None:
    lease_keeper = site.lease_keeper()
    helper = WorkStealer(site.store, lease_keeper, site.model, "idle", 1.0)
    idle = site.worker("idle", site.host(), lease_keeper)
    job_id = job_of(site)
    assert helper.ask()
    assert not helper.ask(), "it was asked already"
    busy.lease_keeper.beat()
    busy.lease_keeper.beat()  # asked once, whatever the number of heartbeats
    busy.go_on()
    wait_for_cut(site)
    first = found(site.store.prompts_of(job_id, FIRST_SPLIT_INDEX))
    # 2 rows of 2 samples run, 62 wait: half of these are given back.
    assert (first.row_start, first.rows) == (33, 31)
    site.work(idle, Stage.VERIFY)
    assert site.store.progress(job_id).groups_done == 0
    assert helper.ask(), "its first part may be cut again"
    while cuts(site) < 2:
        busy.lease_keeper.beat()
        busy.go_on()
    second = found(site.store.prompts_of(job_id, FIRST_SPLIT_INDEX + 1))
    assert second.row_start + second.rows == first.row_start
    site.work(idle, Stage.VERIFY)
    busy.end()
    site.work(idle)
    assert site.state(job_id) is JobState.DONE
    assert site.outcome(job_id) == undisturbed
    assert site.store.progress(job_id).completions == 2 * ROWS
    assert site.output().num_rows == 2 * ROWS


def test_rows_stay_where_they_are_if_the_store_cannot_be_told(
    site: Site, busy: Busy, undisturbed: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()

    def refuse(*_: Any) -> int:
        told.set()
        raise StoreError("the database did not answer in time")

    monkeypatch.setattr(site.store, "split_group", refuse)
    assert site.store.ask_for_split(site.model, "idle") is not None
    busy.lease_keeper.beat()
    busy.go_on()
    assert told.wait(WAIT_SEC)
    busy.end()
    job_id = job_of(site)
    assert site.store.progress(job_id).groups_total == 1
    site.work(site.worker("idle", site.host()))
    assert site.outcome(job_id) == undisturbed


def test_who_lost_the_group_meanwhile_gives_nothing_back(
    site: Site, busy: Busy, undisturbed: Outcome
) -> None:
    job_id = job_of(site)
    assert site.store.ask_for_split(site.model, "idle") is not None
    busy.lease_keeper.beat()
    site.clock.advance(LEASE_SEC)
    idle = site.worker("idle", site.host())
    verify(idle, job_id, 0)
    busy.go_on()
    busy.end()
    assert site.store.progress(job_id).groups_total == 1
    site.work(idle)
    assert site.outcome(job_id) == undisturbed


def test_all_that_is_begun_stays(site: Site, busy: Busy) -> None:
    """The last rows are in the engine when somebody asks: the group is not cut."""
    job_id = job_of(site)
    while busy.engine.unstarted():
        busy.go_on()
    assert site.store.ask_for_split(site.model, "idle") is not None
    busy.lease_keeper.beat()
    busy.end()
    assert site.store.progress(job_id).groups_total == 1


# --- who asks, and who hears it -------------------------------------------------------------
def test_only_who_verifies_nothing_asks() -> None:
    clock = Clock()
    store = sqlite_store(clock)
    ingest(store, groups=2)
    lease = claim(store, 0, owner="busy").lease
    mine = claim(store, 1, owner="idle").lease
    lease_keeper = LeaseKeeper(store, LEASE_SEC * 1000)
    helper = WorkStealer(store, lease_keeper, "big", "idle", 1.0)
    with lease_keeper.hold(mine):
        assert lease_keeper.holds(Stage.VERIFY)
        assert not helper.ask()
    assert helper.ask()
    assert store.heartbeat([lease], LEASE_SEC).split_wanted == {lease}
    helper.close()
    lease_keeper.close()


def test_a_holder_hears_it_once_each_time_it_is_asked() -> None:
    clock = Clock()
    store = sqlite_store(clock)
    ingest(store, groups=1)
    lease = claim(store, 0, owner="busy").lease
    lease_keeper = LeaseKeeper(store, LEASE_SEC * 1000)
    heard: list[str] = []
    with lease_keeper.hold(lease) as held:
        lease_keeper.beat()
        store.ask_for_split("big", "idle")
        lease_keeper.beat()
        held.when_asked_to_split(
            lambda: heard.append("late")
        )  # it was asked before anything could be done
        assert heard == ["late"]
        lease_keeper.beat()
        store.advance(
            claim_after(store, store.split_group(lease, 2)), Stage.RECORD, RESULTS, NO_TIME
        )
        lease_keeper.beat()
        store.ask_for_split("big", "idle")
        lease_keeper.beat()
        lease_keeper.beat()
    assert heard == ["late", "late"]
    lease_keeper.close()


def claim_after(store: SqlStore, index: int) -> Any:
    """Somebody else takes up the group that was cut off."""
    return claim(store, index, owner="idle").lease


def test_helpers_ask_in_a_thread_of_their_own_and_outlive_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = sqlite_store()
    ingest(store, groups=1)
    claim(store, 0, owner="busy")
    lease_keeper = LeaseKeeper(store, LEASE_SEC * 1000)
    answers: list[Exception | None] = [StoreError("away"), RuntimeError("a bug"), None]
    asked = threading.Event()

    def answer(*_: Any) -> tuple[str, int]:
        if error := answers.pop(0) if answers else None:
            raise error
        asked.set()
        return JOB, 0

    monkeypatch.setattr(store, "ask_for_split", answer)
    helper = WorkStealer(store, lease_keeper, "big", "idle", 0.001)
    helper.start()
    assert asked.wait(WAIT_SEC)
    helper.close()
    lease_keeper.close()
