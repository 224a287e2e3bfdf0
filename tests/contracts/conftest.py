"""The three stores, each with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger.builders import Clock

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.memory.store import MemoryStore
from specbatch.pipeline.ledger.sql.migrate import open_store
from support.databases import migrated


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def store(request: pytest.FixtureRequest, clock: Clock, tmp_path: Path) -> Iterator[Store]:
    opened: Store
    if request.param == "memory":
        opened = MemoryStore(max_attempts=3, clock=clock)
    elif request.param == "sqlite":
        opened = open_store(migrated(tmp_path / "store" / "test.db"), max_attempts=3, clock=clock)
    else:
        opened = open_store(request.getfixturevalue("postgres_url"), max_attempts=3, clock=clock)
    yield opened
    opened.close()
