"""Runs on the stand-in engine.

Real processes over Redis and SQLite are killed at crash points with SIGKILL, frozen with SIGSTOP
past their leases, and made to fail as disks, links and databases do; messages are doubled, held
back and changed in order. Each run is a job, or some, held to the law. By default there is one run
for each crash point, with every deed there. The tier `long` has 990 seeded ones: any 30 seeds in a
row have every deed at every point.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
from faults.sites import SITES, Sites

from specbatch.jobs.chaos.harness import Ran
from specbatch.jobs.chaos.plan import DEEDS, POINTS, TIMES, Disturbance, Plan, plan_of

AT_A_TIME = 30
WORKERS = 2
LONG = range(0, 990, AT_A_TIME)


def every_deed_at(seed: int) -> Plan:
    """Whoever comes to a point is hit there, early in a job and late, by another deed each time."""
    draw = random.Random(seed)
    most = max(TIMES[POINTS[seed]], len(DEEDS))  # a point that is rarer is reached again by a retry
    places = draw.sample(range(1, most + 1), len(DEEDS))
    return Plan(
        seed=seed,
        disturbances=tuple(
            Disturbance(POINTS[seed], deed, nth, variant=draw.getrandbits(16))
            for nth, deed in zip(places, DEEDS, strict=True)
        ),
        group_size=draw.choice((3, 4, 6)),
        writes_ahead=True,
        message_seed=seed if seed % 2 else None,
    )


def run(sites: Sites, plans: Iterable[Plan]) -> list[Ran]:
    """All of them, on as many sites as there are."""

    def one(plan: Plan) -> Ran:
        here = sites.free.get()
        try:
            return here.run(plan)
        finally:
            sites.free.put(here)

    with ThreadPoolExecutor(SITES) as threads:
        return list(threads.map(one, plans))


def hold_to_the_law(ran: list[Ran]) -> None:
    broken = {str(r.plan): r.violations for r in ran if r.violations}
    assert not broken
    missed = {str(r.plan): [str(d) for d in r.missed] for r in ran if r.missed}
    assert not missed, "disturbances that nobody came to prove nothing"
    assert all(r.reports for r in ran)
    fired = {(d.point, d.deed) for r in ran for d in r.fired}
    assert fired >= {(point, deed) for point in POINTS for deed in DEEDS}


def test_nothing_is_lost_and_nothing_done_twice(sites: Sites) -> None:
    hold_to_the_law(run(sites, map(every_deed_at, range(len(POINTS)))))


@pytest.mark.long
@pytest.mark.parametrize("first", LONG)
def test_nothing_is_lost_and_nothing_done_twice_in_many_more_runs(sites: Sites, first: int) -> None:
    seeds = range(first, first + AT_A_TIME)
    hold_to_the_law(run(sites, [plan_of(seed, WORKERS) for seed in seeds]))
