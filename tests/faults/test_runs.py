"""Seeded runs on the stand-in engine.

Real processes over Redis and SQLite are killed at crash points with SIGKILL, frozen with SIGSTOP
past their leases, and made to fail as disks, links and databases do; messages are doubled, held
back and changed in order. Each run is a job, or some, held to the law. Any 30 seeds in a row have
every deed at every point: the default has those, the tier `long` more than nine hundred others.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
from faults.sites import SITES, Sites

from specbatch.jobs.chaos.harness import Ran
from specbatch.jobs.chaos.plan import DEEDS, POINTS, plan_of

AT_A_TIME = 30
WORKERS = 2
LONG = range(AT_A_TIME, 990, AT_A_TIME)


def run(sites: Sites, seeds: Iterable[int]) -> list[Ran]:
    """All of them, on as many sites as there are."""

    def one(seed: int) -> Ran:
        here = sites.free.get()
        try:
            return here.run(plan_of(seed, WORKERS))
        finally:
            sites.free.put(here)

    with ThreadPoolExecutor(SITES) as threads:
        return list(threads.map(one, seeds))


def hold_to_the_law(ran: list[Ran]) -> None:
    broken = {str(r.plan): r.violations for r in ran if r.violations}
    assert not broken
    missed = {str(r.plan): [str(d) for d in r.missed] for r in ran if r.missed}
    assert not missed, "disturbances that nobody came to prove nothing"
    assert all(r.reports for r in ran)
    fired = {(d.point, d.deed) for r in ran for d in r.fired}
    assert fired >= {(point, deed) for point in POINTS for deed in DEEDS}


def test_nothing_is_lost_and_nothing_done_twice(sites: Sites) -> None:
    hold_to_the_law(run(sites, range(AT_A_TIME)))


@pytest.mark.long
@pytest.mark.parametrize("first", LONG)
def test_nothing_is_lost_and_nothing_done_twice_in_many_more_runs(sites: Sites, first: int) -> None:
    hold_to_the_law(run(sites, range(first, first + AT_A_TIME)))
