"""Sites under fire, and the servers that they are on.

Their workers are forks of one process, which imports everything once. A test that changes the
environment of its workers has one of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
from faults.sites import SITES, Sites

from specbatch.jobs.chaos.forkserver import ForkServer
from specbatch.jobs.chaos.harness import Site, site
from support.servers import PrivateRedis, ServerError


@pytest.fixture(scope="session")
def forkserver() -> Iterator[ForkServer]:
    """What all workers with the stand-in are forks of."""
    with closing(ForkServer("stand-in")) as made:
        yield made


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory, forkserver: ForkServer) -> Iterator[Sites]:
    """On SQLite and one Redis: workers are started once and restarted when they are killed."""
    with _sites(tmp_path_factory, forkserver, step_sec=0.0) as made:
        yield made


@pytest.fixture(scope="module")
def slow_sites(tmp_path_factory: pytest.TempPathFactory, forkserver: ForkServer) -> Iterator[Sites]:
    """The same with steps that take a while, so that things happen in the midst of a job."""
    with _sites(tmp_path_factory, forkserver, step_sec=0.01) as made:
        yield made


@contextmanager
def _sites(
    tmp_path_factory: pytest.TempPathFactory, forkserver: ForkServer, step_sec: float
) -> Iterator[Sites]:
    made = Sites()
    with ExitStack() as stack:
        try:
            redis = stack.enter_context(PrivateRedis())
        except ServerError as error:
            pytest.fail(str(error), pytrace=False)
        for number in range(SITES):
            folder = tmp_path_factory.mktemp("site") / str(number)
            here = site(folder, redis.url_of(number), step_sec=step_sec, forkserver=forkserver)
            made.free.put(stack.enter_context(here))
        yield made


@pytest.fixture(scope="module")
def one_site(tmp_path_factory: pytest.TempPathFactory, forkserver: ForkServer) -> Iterator[Site]:
    """A site of one file's tests, which run one after another."""
    folder = tmp_path_factory.mktemp("site")
    with PrivateRedis() as redis, site(folder, redis.url, forkserver=forkserver) as made:
        yield made
