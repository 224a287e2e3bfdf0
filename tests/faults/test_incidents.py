"""Seeded runs on the stand-in engine in which something happens to the surroundings of all workers.

The verifier's files are replaced under its name and put back; workers with other files, or of
another numeric class, join; the store is restored from a copy, with workers at work or stopped;
queues become strings and garbage lies among unacknowledged messages; the disk is full for a while;
clocks of workers are minutes apart. Often a worker is killed, frozen or broken besides. Each job is
held to the law of `jobs/chaos/conservation.py`, its outputs to those of a job that had the same
files and class and nothing in its way. After a store was restored, time that an attempt had before
may be in no row; it counts as lost.

On two cores that do nothing else the 20 runs of the default suite take about 1 minute, and the 300
of `--long` about 12.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
from faults.sites import SITES, Sites

from specbatch.jobs.chaos.harness import Ran
from specbatch.jobs.chaos.plan import INCIDENTS, incident_plan_of

WORKERS = 2
AT_A_TIME = 10
BY_DEFAULT = range(0, 20, AT_A_TIME)
LONG = range(20, 320, AT_A_TIME)


def run(sites: Sites, seeds: Iterable[int]) -> list[Ran]:
    """All of them, on as many sites as there are."""

    def one(seed: int) -> Ran:
        here = sites.free.get()
        try:
            return here.run(incident_plan_of(seed, WORKERS))
        finally:
            sites.free.put(here)

    with ThreadPoolExecutor(SITES) as threads:
        return list(threads.map(one, seeds))


def hold_to_the_law(ran: list[Ran]) -> None:
    broken = {str(r.plan): r.violations for r in ran if r.violations}
    assert not broken
    idle = [str(r.plan) for r in ran if r.missed or not r.happened]
    assert not idle, "what nobody met proves nothing"
    assert all(r.reports for r in ran)
    assert {r.plan.incident.kind for r in ran if r.plan.incident} == set(INCIDENTS)


@pytest.mark.parametrize("first", BY_DEFAULT)
def test_nothing_is_lost_doubled_or_wrong(slow_sites: Sites, first: int) -> None:
    hold_to_the_law(run(slow_sites, range(first, first + AT_A_TIME)))


@pytest.mark.long
@pytest.mark.parametrize("first", LONG)
def test_nothing_is_lost_doubled_or_wrong_in_many_more_runs(slow_sites: Sites, first: int) -> None:
    hold_to_the_law(run(slow_sites, range(first, first + AT_A_TIME)))
