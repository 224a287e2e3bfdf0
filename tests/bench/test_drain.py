"""A hundred thousand rows through worker processes: all come out, and no process grows by them."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbatch.benchmarks.drain import POINTS, WORKERS, drain
from specbatch.schemas.settings import Settings

ROWS, GROUP_SIZE = 100_000, 100
MOST_GROWTH = 1.10
MOST_OF_RECORD = 1.30  # after a fifth of the rows it writes its first part of the output


@pytest.mark.long
def test_memory_stays_flat_over_many_rows_and_groups(
    redis_url: str, postgres_url: str, tmp_path: Path
) -> None:
    settings = Settings(
        broker_url=redis_url, database_url=postgres_url, workspace=str(tmp_path / "workspace")
    )
    told: list[str] = []
    done = drain(settings, tmp_path, ROWS, GROUP_SIZE, 2, {}, told.append)
    assert done.groups == ROWS // GROUP_SIZE
    assert {name: len(points) for name, points in done.memory.items()} == dict.fromkeys(
        WORKERS, POINTS
    )
    assert len(told) == POINTS
    growth = done.growth()
    assert growth.pop("record") <= MOST_OF_RECORD
    assert max(growth.values()) <= MOST_GROWTH, growth
