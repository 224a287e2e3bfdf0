"""Two pools of workers in this process: who gets a job's groups, and who does when one dies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from faults.in_process import DEAD_SEC, Shop, attempt, shop

from specbatch.jobs.chaos.plan import Plan
from specbatch.pipeline.bootstrap import Worker, make_client, site_of
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.schemas.placement import PlacementSpec
from specbatch.schemas.records import DueWork, Stage

PLAN = Plan(0, (), group_size=2, writes_ahead=False)


class Pools:
    """Workers that open a shop's store from where they are. Each has a pool of its own."""

    def __init__(self, made: Shop, opened: ExitStack) -> None:
        self.shop = made
        self._opened = opened
        self._settings = made.settings
        self.enqueued: list[DueWork] = []

    def hire(self, pool: str, usd: float, region: str = "eu", tenure: str = "reserved") -> Worker:
        about = {"pool": pool, "region": region, "tenure": tenure}
        settings = self.shop.settings = self._settings.model_copy(update=about)
        url = f"sqlite:///{self.shop.folder / 'specbatch.db'}"
        store = SqlStore(url, max_attempts=100, clock=self.shop.clock, site=site_of(settings))
        worker = self.shop.hire(self._opened.enter_context(closing(store)), usd)
        assert worker.timekeeper is not None
        assert worker.context.placer is not None
        worker.timekeeper.beat()
        worker.context.placer._fresh_sec = 0.0
        worker.context.requeuer._every_sec = 0.0
        worker.context.requeuer._enqueue = self.enqueued.append
        return worker

    def submit(self, **values: object) -> str:
        """A job of the shop's shape, with these values."""
        spec = self.shop.spec(PLAN).model_copy(update=values)
        job, _ = make_client(self.shop.settings, lambda _: None, self.shop.store).submit(spec)
        return job.job_id

    def due(self, job_id: str) -> list[DueWork]:
        return [message for message in self.shop.store.due() if message.job_id == job_id]

    def verified_by(self, job_id: str) -> Counter[str]:
        """How many groups each pool has verified."""
        return Counter(
            one.device.pool
            for one in self.shop.store.time_slices(job_id)
            if one.attempt.stage is Stage.VERIFY and one.kept
        )

    def is_over(self, job_id: str) -> bool:
        return self.shop.store.get_job(job_id).state.is_final


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with shop(tmp_path_factory.mktemp("pools")) as made:
        yield made


@pytest.fixture
def pools(made: Shop) -> Iterator[Pools]:
    made.clock.advance(DEAD_SEC)  # workers of before are dead
    with ExitStack() as opened:
        yield Pools(made, opened)
        made.dismiss_hired()


def test_all_groups_go_to_the_cheaper_pool_and_when_it_dies_to_the_dearer(pools: Pools) -> None:
    dear, cheap = pools.hire("on-demand", 4.0), pools.hire("spot", 0.5, tenure="spot")
    job_id = pools.submit()
    attempt(dear, DueWork(job_id, Stage.INGEST, None))
    groups = pools.shop.store.progress(job_id).groups_total
    for message in pools.due(job_id):
        attempt(dear, message)
    assert pools.verified_by(job_id) == {}, "it is asked first, and leaves them"
    assert {message.job_id for message in pools.enqueued} == {job_id}
    while pools.verified_by(job_id)["spot"] < groups // 2:
        message = pools.due(job_id)[0]
        for worker in (dear, cheap):
            attempt(worker, message)
    assert pools.verified_by(job_id).keys() == {"spot"}

    pools.shop.clock.advance(DEAD_SEC)  # the cheap worker says nothing any more
    assert dear.timekeeper is not None
    dear.timekeeper.beat()
    pools.shop.drain(job_id, dear)
    assert pools.verified_by(job_id) == {"spot": groups // 2, "on-demand": groups - groups // 2}
    assert pools.shop.report(job_id).violations == ()


def test_a_deadline_that_the_cheaper_pool_does_not_meet_brings_the_dearer(pools: Pools) -> None:
    dear, cheap = pools.hire("on-demand", 4.0), pools.hire("cheap", 0.5)
    job_id = pools.submit(deadline_sec=86_400.0)
    attempt(cheap, DueWork(job_id, Stage.INGEST, None))
    first = pools.due(job_id)[0]
    attempt(cheap, first)  # from now on its speed is known
    while any(message.stage is not Stage.VERIFY for message in pools.due(job_id)):
        attempt(cheap, next(m for m in pools.due(job_id) if m.stage is not Stage.VERIFY))
    attempt(dear, pools.due(job_id)[0])
    assert pools.verified_by(job_id).keys() == {"cheap"}
    pools.shop.clock.advance(86_399.999)
    for worker in (dear, cheap):
        assert worker.timekeeper is not None
        worker.timekeeper.beat()
    attempt(dear, pools.due(job_id)[0])
    assert pools.verified_by(job_id)["on-demand"] == 1


def test_a_job_that_is_bound_to_a_region_is_never_touched_by_another(pools: Pools) -> None:
    near, far = pools.hire("near", 4.0, region="eu"), pools.hire("far", 0.5, region="us")
    job_id = pools.submit(placement=PlacementSpec(regions=("eu",)))
    while not pools.is_over(job_id):
        message = pools.due(job_id)[0]
        attempt(far, message)
        assert message in pools.due(job_id), "nothing has happened to it"
        attempt(near, message)
    assert pools.verified_by(job_id).keys() == {"near"}
    assert pools.shop.report(job_id).violations == ()
    slices = pools.shop.store.time_slices(job_id)
    assert {one.device.region for one in slices} == {"eu"}


def test_it_waits_as_long_as_no_worker_of_its_region_is_there(pools: Pools) -> None:
    near, far = pools.hire("near", 4.0, region="eu"), pools.hire("far", 0.5, region="us")
    job_id = pools.submit(placement=PlacementSpec(regions=("eu",)))
    while not any(message.stage is Stage.VERIFY for message in pools.due(job_id)):
        attempt(near, pools.due(job_id)[0])
    pools.shop.clock.advance(DEAD_SEC)
    assert far.timekeeper is not None
    far.timekeeper.beat()
    waits = pools.shop.store.backlog().waiting(DEAD_SEC - 1)
    assert "waits for a worker in region eu to verify; alive: us" in waits[job_id]
    before = pools.verified_by(job_id)
    for message in pools.due(job_id):
        attempt(far, message)
    assert pools.verified_by(job_id) == before
