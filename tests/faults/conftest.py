"""Sites under fire, and the servers that they are on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from faults.sites import SITES, Sites

from specbatch.jobs.chaos.harness import Site, site
from support.servers import PrivateRedis, ServerError


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    """On SQLite and one Redis: workers are started once and restarted when they are killed."""
    with _sites(tmp_path_factory, step_sec=0.0) as made:
        yield made


@pytest.fixture(scope="module")
def slow_sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    """The same with steps that take a while, so that things happen in the midst of a job."""
    with _sites(tmp_path_factory, step_sec=0.01) as made:
        yield made


@contextmanager
def _sites(tmp_path_factory: pytest.TempPathFactory, step_sec: float) -> Iterator[Sites]:
    made = Sites()
    with ExitStack() as stack:
        try:
            redis = stack.enter_context(PrivateRedis())
        except ServerError as error:
            pytest.fail(str(error), pytrace=False)
        for number in range(SITES):
            folder = tmp_path_factory.mktemp("site") / str(number)
            here = site(folder, redis.url_of(number), step_sec=step_sec)
            made.free.put(stack.enter_context(here))
        yield made


@pytest.fixture
def one_site(tmp_path: Path, redis_url: str) -> Iterator[Site]:
    """A site of this test's own."""
    with site(tmp_path / "site", redis_url) as made:
        yield made
