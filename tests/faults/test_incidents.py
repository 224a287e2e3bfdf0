"""Seeded runs on the stand-in engine in which something happens to the surroundings of all workers.

The verifier's files are replaced under its name and put back; workers with other files, or of
another numeric class, join; the store is restored from a copy, with workers at work or stopped;
queues become strings and garbage lies among unacknowledged messages; the disk is full for a while;
clocks of workers are minutes apart. Often a worker is killed, frozen or broken besides. Each job is
held to the law of `jobs/chaos/conservation.py`, its outputs to those of a job that had the same
files and class and nothing in its way. After a store was restored, the time of jobs that ran
then is held to nothing: what was told of it before is gone.

Any 9 seeds in a row have every incident: 9 runs are made by default, and 315 in the tier `long`,
which take about 12 minutes on two cores that do nothing else.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faults.sites import SITES, Sites

from specbatch.jobs.chaos.forkserver import ForkServer
from specbatch.jobs.chaos.harness import Ran, Site, site
from specbatch.jobs.chaos.plan import INCIDENTS, Incident, IncidentKind, Plan, incident_plan_of
from specbatch.jobs.chaos.pool import ChaosError
from support.postgres_copy import PostgresCopy
from support.servers import PrivatePostgres, PrivateRedis

WORKERS = 2
AT_A_TIME = 9
LONG = range(AT_A_TIME, 320, AT_A_TIME)


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
    assert not broken, "\n".join(f"{plan}: {found}" for plan, found in broken.items())
    idle = [str(r.plan) for r in ran if r.missed or not r.happened]
    assert not idle, "what nobody met proves nothing"
    assert all(r.reports for r in ran)
    assert {r.plan.incident.kind for r in ran if r.plan.incident} == set(INCIDENTS)


def test_nothing_is_lost_doubled_or_wrong(slow_sites: Sites) -> None:
    hold_to_the_law(run(slow_sites, range(AT_A_TIME)))


@pytest.mark.long
@pytest.mark.parametrize("first", LONG)
def test_nothing_is_lost_doubled_or_wrong_in_many_more_runs(slow_sites: Sites, first: int) -> None:
    hold_to_the_law(run(slow_sites, range(first, first + AT_A_TIME)))


# --- PostgreSQL -----------------------------------------------------------------------------
ON_POSTGRES = (
    Incident(IncidentKind.STORE_RESTORED, at_rows=1, lasts_sec=0.3),
    Incident(IncidentKind.STORE_RESTORED_STOPPED, at_rows=1, lasts_sec=0.3),
    Incident(IncidentKind.CLOCKS_APART, at_rows=1, lasts_sec=math.inf, variant=3),
)


@pytest.fixture(scope="module")
def on_postgres(
    tmp_path_factory: pytest.TempPathFactory,
    postgres_server: PrivatePostgres,
    forkserver: ForkServer,
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("postgres")
    url = postgres_server.create_database()
    with (
        PrivateRedis() as redis,
        site(
            folder,
            redis.url,
            step_sec=0.01,
            database_url=url,
            copy=PostgresCopy(url),
            forkserver=forkserver,
        ) as here,
    ):
        yield here


@pytest.mark.parametrize("incident", ON_POSTGRES, ids=lambda incident: incident.kind.name.lower())
def test_nothing_is_lost_doubled_or_wrong_on_postgres(
    on_postgres: Site, incident: Incident
) -> None:
    plan = Plan(0, (), group_size=3, writes_ahead=True, incident=incident)
    ran = on_postgres.run(plan)
    assert ran.happened
    assert ran.violations == []


# --- planted --------------------------------------------------------------------------------
# Imported by every interpreter that finds it on its path: claims compare no models any more.
ANY_MODEL = """
from specbatch.pipeline.ledger.sql import pinning
from specbatch.schemas.numeric_class import Serves

pinning.served = lambda serves, table=None: []
Serves.takes = lambda self, pinned: True
"""


def test_a_store_that_compares_no_models_is_found_out(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "sitecustomize.py").write_text(ANY_MODEL)
    path = os.pathsep.join([str(tmp_path / "planted"), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path.rstrip(os.pathsep))
    joined = Incident(IncidentKind.MODELS_MIXED, lasts_sec=math.inf)
    with site(tmp_path / "site", redis_url, step_sec=0.01) as here:
        found = ""
        for _ in range(25):  # by chance one host's workers may do it all
            try:
                ran = here.run(Plan(0, (), group_size=3, writes_ahead=False, incident=joined))
            except ChaosError as error:  # they did what was to show the other host's outputs
                found = str(error)
            else:
                found = "\n".join(ran.violations)
            if found:
                break
    assert "differ from the undisturbed run" in found or "the same as those of others" in found
