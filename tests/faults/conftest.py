"""Sites under fire, and the servers that they are on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from faults.sites import SITES, Sites

from specbatch.jobs.chaos.harness import Site, site
from support.servers import PrivateRedis, ServerError


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    """On SQLite and one Redis: workers are started once and restarted when they are killed."""
    made = Sites()
    with ExitStack() as stack:
        try:
            redis = stack.enter_context(PrivateRedis())
        except ServerError as error:
            pytest.fail(str(error), pytrace=False)
        for number in range(SITES):
            folder = tmp_path_factory.mktemp("site") / str(number)
            made.free.put(stack.enter_context(site(folder, redis.url_of(number))))
        yield made


@pytest.fixture
def one_site(tmp_path: Path, redis_url: str) -> Iterator[Site]:
    """A site of this test's own."""
    with site(tmp_path / "site", redis_url) as made:
        yield made
