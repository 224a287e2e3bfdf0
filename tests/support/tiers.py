"""The four tiers of tests, each with its `make` target; every test is in exactly one.

    unit         make check              no server: seconds a file
    pipeline     make test, with unit    real Redis, PostgreSQL and S3; crashes; bit for bit
    integration  make test-integrations  Airflow, Dagster, a browser, RabbitMQ, Alertmanager
    long         make test-long          full grids and a thousand disturbed runs

A folder has a tier. A mark on a file, a test or a parameter puts it into another one: the highest
mark counts. A test that asks for the fixture of a server is at least in the tier of that server.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest

TIERS = ("unit", "pipeline", "integration", "long")
BY_DEFAULT = ("unit", "pipeline")

FOLDERS = {
    "architecture": "unit",
    "bench": "unit",
    "cli": "unit",
    "contracts": "unit",
    "dags": "integration",
    "demo": "unit",
    "deploy": "unit",
    "docs": "unit",
    "end_to_end": "pipeline",
    "engine": "unit",
    "faults": "pipeline",
    "ingest": "unit",
    "kernels": "unit",
    "ledger": "unit",
    "nothing_false": "pipeline",
    "observe": "unit",
    "pipeline": "unit",
    "policy": "unit",
    "privacy": "unit",
    "schedules": "unit",
    "schemas": "unit",
    "support": "pipeline",
    "workers": "unit",
}
FIXTURES = {
    "redis_server": "pipeline",
    "postgres_server": "pipeline",
    "s3_server": "pipeline",
    "own_redis": "pipeline",
    "own_postgres": "pipeline",
    "rabbit_server": "integration",
    "own_rabbit": "integration",
    "browser": "integration",
    "run_inside": "integration",  # Airflow and Dagster
    "session": "integration",  # the commands of the documentation
}
TIER_OF = pytest.StashKey[str]()  # in a test's stash
COLLECTED = pytest.StashKey[list[pytest.Item]]()  # in the configuration's: the tests of all tiers


def tier_of(folder: str, marks: Iterable[str], fixtures: Collection[str]) -> str:
    """The tier of a test in `folder` that has these marks and asks for these fixtures."""
    own = [mark for mark in marks if mark in TIERS] or [FOLDERS[folder]]
    needed = [tier for fixture, tier in FIXTURES.items() if fixture in fixtures]
    return max(own + needed, key=TIERS.index)
