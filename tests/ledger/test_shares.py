"""Tenants' shares of device time, over an hour of a simulated fleet on the real store.

Workers are virtual: they claim groups, let simulated seconds pass and store results. What a group
takes differs by tenant and by group, and no estimate knows it.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ledger.builders import LEASE_SEC, RESULTS, ROW_BOUND, Clock, new_group, new_job, position

from specbatch.pipeline.ledger import fair_share
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.schemas.records import NORMAL, Stage, StageTiming
from support.databases import migrated

HOUR = 3600.0
WEIGHTS = {"greedy": 1.0, "small": 2.0, "large": 5.0}
# Device seconds per token of a group's bound: outputs end early, prompts and models differ.
PACE = {"greedy": 0.15, "small": 0.4, "large": 0.35, "late": 0.2}
HIGH, LOW = 0, 2
DEADLINE = 320.0


@dataclass
class Fleet:
    """A store, and workers that claim from it in simulated time, from 0 on."""

    store: SqlStore
    clock: Clock
    workers: int = 4
    tick: float = 300.0  # of its clock: a store keeps its statements while the time is the same
    ran: list[tuple[float, float, str, str]] = field(default_factory=list)  # from, to, tenant, job
    later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    jobs: int = 0

    def __post_init__(self) -> None:
        self.began = self.clock.now
        self.free = [(0.0, worker) for worker in range(self.workers)]

    def submit(
        self,
        tenant: str,
        groups: int,
        rows: int = 4,
        priority: int = NORMAL,
        deadline_sec: float | None = None,
    ) -> str:
        """A job whose input is read. `deadline_sec`: from now on."""
        self.jobs += 1
        job_id = f"job-{self.jobs:03d}-{tenant}"
        values = {"tenant": tenant, "priority": priority, "deadline_sec": deadline_sec}
        self.store.create_job(new_job(job_id, **values))
        work = self.store.claim_job(job_id, Stage.INGEST, "i", LEASE_SEC)
        assert work is not None
        planned = [new_group(index, rows) for index in range(groups)]
        self.store.add_groups(work.lease, planned, [], groups * rows, position())
        self.store.finish_ingest(work.lease, groups * rows, {})
        return job_id

    def run(self, until: float) -> None:
        """Let the workers work up to this time; a group that has begun by then ends."""
        while self.free[0][0] < until:
            at, worker = heapq.heappop(self.free)
            self.clock.now = self.began + at // self.tick * self.tick
            while self.later and self.later[0][0] <= at:
                self.later.pop(0)[1]()
            heapq.heappush(self.free, (self._work(at), worker))

    def _work(self, at: float) -> float:
        """Claim a group and plan its end; returns when the worker is free."""
        work = self.store.claim_next(Stage.VERIFY, "big", "w", 2 * HOUR)
        if work is None:
            return at + 1.0
        tenant = work.lease.job_id.rpartition("-")[2]
        chance = random.Random(f"{work.lease.job_id}/{work.lease.group_index}")
        took = work.rows * ROW_BOUND * PACE[tenant] * chance.uniform(0.4, 1.6)
        end = at + took
        self.ran.append((at, end, tenant, work.lease.job_id))

        def store_results() -> None:
            self.store.advance(work.lease, Stage.RECORD, RESULTS, StageTiming(took))

        self.later = sorted([*self.later, (end, store_results)], key=lambda one: one[0])
        return end

    def shares(self, since: float, until: float) -> dict[str, float]:
        """Each tenant's part of the device time between."""
        had: dict[str, float] = {}
        for begin, end, tenant, _ in self.ran:
            both = max(0.0, min(end, until) - max(begin, since))
            had[tenant] = had.get(tenant, 0.0) + both
        whole = sum(had.values())
        return {tenant: seconds / whole for tenant, seconds in had.items() if seconds}

    def ended(self, job_id: str) -> float:
        return max(end for _, end, _, job in self.ran if job == job_id)


def by_weight(*tenants: str, **weights: float) -> dict[str, float]:
    known = {name: {**WEIGHTS, **weights}.get(name, 1.0) for name in tenants}
    return {name: weight / sum(known.values()) for name, weight in known.items()}


def assert_shares(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    for tenant, share in expected.items():
        assert found[tenant] == pytest.approx(share, rel=0.05), (tenant, found, expected)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    clock = Clock()
    migrated(tmp_path / "store.db")
    store = SqlStore(f"sqlite:///{tmp_path}/store.db", clock=clock, weights=WEIGHTS)
    yield Fleet(store, clock)
    store.close()


def flood(fleet: Fleet, rows: int = 16) -> None:
    """Ten times the jobs of others, in large groups, and all of high priority."""
    for _ in range(10):
        fleet.submit("greedy", 30, rows=rows, priority=HIGH)


def test_three_tenants_share_an_hour_by_their_weights_though_one_is_greedy(fleet: Fleet) -> None:
    flood(fleet)
    fleet.submit("small", 400)
    fleet.submit("large", 600, rows=6)
    fleet.run(until=HOUR)
    assert_shares(fleet.shares(0, HOUR), by_weight("greedy", "small", "large"))


def test_who_comes_late_has_its_share_from_then_on_and_nothing_of_the_past(fleet: Fleet) -> None:
    flood(fleet, rows=8)
    fleet.submit("large", 300)
    fleet.run(until=900)
    fleet.submit("late", 300)
    fleet.run(until=1800)
    assert_shares(fleet.shares(0, 900), by_weight("greedy", "large"))
    expected = by_weight("greedy", "large", "late")
    assert_shares(fleet.shares(900, 1800), expected)
    first_minutes = fleet.shares(900, 1200)
    assert first_minutes["late"] < 1.3 * expected["late"], "it is not served alone"


def test_the_share_of_an_idle_tenant_goes_to_the_others_by_their_weights(fleet: Fleet) -> None:
    flood(fleet, rows=8)
    fleet.submit("small", 300)
    fleet.submit("large", 40)  # about 900 device seconds, of which it has 2.5 a second
    fleet.run(until=1200)
    idle_from = max(end for _, end, tenant, _ in fleet.ran if tenant == "large")
    assert idle_from < 500
    assert_shares(fleet.shares(idle_from, 1200), by_weight("greedy", "small"))
    fleet.submit("large", 300)
    fleet.run(until=2000)
    assert_shares(fleet.shares(1200, 2000), by_weight("greedy", "small", "large"))


def test_within_a_tenant_the_higher_priority_is_done_first(fleet: Fleet) -> None:
    fleet.submit("large", 100)
    low = fleet.submit("small", 8, priority=LOW)
    normal = fleet.submit("small", 8)
    high = fleet.submit("small", 8, priority=HIGH)
    fleet.run(until=720)
    begins = {
        job: [begin for begin, _, _, of in fleet.ran if of == job] for job in (high, normal, low)
    }
    assert [len(times) for times in begins.values()] == [8, 8, 8]
    assert max(begins[high]) <= min(begins[normal])
    assert max(begins[normal]) <= min(begins[low])


@pytest.mark.parametrize("lead_sec", [fair_share.LEAD_SEC, 0.0])
def test_a_deadline_is_met_though_its_tenant_gets_a_little_ahead_of_its_share(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, lead_sec: float
) -> None:
    """Its tenant has one device second in each; the job takes a few more than there are."""
    monkeypatch.setattr(fair_share, "LEAD_SEC", lead_sec)
    fleet.tick = 60.0
    flood(fleet, rows=8)
    fleet.submit("large", 200)
    fleet.submit("small", 100)
    urgent = fleet.submit("small", 14, deadline_sec=DEADLINE)
    fleet.run(until=480)
    assert (fleet.ended(urgent) <= DEADLINE) == (lead_sec > 0)
    if lead_sec > 0:
        fleet.run(until=1200)
        assert_shares(fleet.shares(0, 1200), by_weight("greedy", "small", "large"))


def test_deadlines_of_all_its_jobs_buy_a_tenant_no_larger_share(fleet: Fleet) -> None:
    fleet.tick = 60.0
    for _ in range(10):
        fleet.submit("greedy", 30, rows=8, deadline_sec=900.0)
    fleet.submit("large", 300)
    fleet.run(until=1700)
    assert_shares(fleet.shares(0, 400), by_weight("greedy", "large"))
    assert_shares(fleet.shares(600, 1700), by_weight("greedy", "large"))
