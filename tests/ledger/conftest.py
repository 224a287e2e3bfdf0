"""A migrated database of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.databases import migrated


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Its URL."""
    if request.param == "sqlite":
        return migrated(tmp_path / "store.db")
    found: str = request.getfixturevalue("postgres_url")
    return found
