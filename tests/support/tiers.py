"""The four tiers of tests, each with its `make` target; every test is in exactly one.

    unit         make check              no server, no model that is run
    pipeline     make test, with unit    real Redis, PostgreSQL and S3; crashes; bit for bit
    integration  make test-integrations  schedulers, a browser, RabbitMQ, Alertmanager
    long         make test-long          full grids and a thousand disturbed runs

A folder has a tier. A mark on a file, a test or a parameter puts it into another one: the highest
mark counts. A test that asks for a fixture of `NEEDS`, or has such a parameter, is at least in its
tier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest

TIERS = ("unit", "pipeline", "integration", "long")
BY_DEFAULT = ("unit", "pipeline")

FOLDERS = {
    "api": "unit",
    "architecture": "unit",
    "bench": "unit",
    "cli": "unit",
    "contracts": "unit",
    "dags": "integration",
    "demo": "pipeline",
    "deploy": "unit",
    "docs": "unit",
    "end_to_end": "pipeline",
    "engine": "unit",
    "faults": "pipeline",
    "ingest": "unit",
    "kernels": "unit",
    "learning": "unit",
    "ledger": "unit",
    "moderation": "unit",
    "nothing_false": "pipeline",
    "observe": "unit",
    "pipeline": "unit",
    "policy": "unit",
    "privacy": "unit",
    "schedules": "unit",
    "schemas": "unit",
    "serve": "unit",
    "support": "pipeline",
    "vllm_engine": "unit",
    "workers": "unit",
}
NEEDS = {  # fixtures, and a parameter
    "tiny_pair": "pipeline",  # models, which are run
    "triton": "pipeline",  # kernels, which are interpreted
    "redis_server": "pipeline",
    "postgres_server": "pipeline",
    "postgres": "pipeline",
    "s3_server": "pipeline",
    "own_redis": "pipeline",
    "own_postgres": "pipeline",
    "rabbit_server": "integration",
    "own_rabbit": "integration",
    "browser": "integration",
    "run_inside": "integration",  # Airflow, Dagster, Prefect
    "session": "integration",  # the commands of the documentation
}
TIER_OF = pytest.StashKey[str]()  # in a test's stash
COLLECTED = pytest.StashKey[list[pytest.Item]]()  # in the configuration's: the tests of all tiers


def tier_of(folder: str, marks: Iterable[str], needs: Collection[str]) -> str:
    """The tier of a test in `folder` that has these marks and needs these fixtures."""
    own = [mark for mark in marks if mark in TIERS] or [FOLDERS[folder]]
    return max(own + [tier for need, tier in NEEDS.items() if need in needs], key=TIERS.index)
