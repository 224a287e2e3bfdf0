"""Both databases, each with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ledger.builders import Clock

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.sql.migrate import open_store
from support.databases import new_database


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    """A database with the tables and nothing in them."""
    if request.param == "sqlite":
        return new_database()
    found: str = request.getfixturevalue("postgres_url")
    return found


@pytest.fixture
def store(url: str, clock: Clock) -> Iterator[Store]:
    opened = open_store(url, max_attempts=3, clock=clock)
    yield opened
    opened.close()
