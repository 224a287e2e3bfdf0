"""Databases without jobs whose schema is up to date: the migrations make one, the rest are copies.

A migration takes half a second. What migrations do is tested in `ledger/test_migrations.py`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory


def migrated(path: Path) -> str:
    """Make a SQLite database; its URL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_sqlite())
    path.chmod(0o600)  # as one that the program makes
    return f"sqlite:///{path}"


@cache
def _sqlite() -> bytes:
    from specbatch.pipeline.ledger.sql.migrate import upgrade

    with TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        upgrade(f"sqlite:///{path}")
        return path.read_bytes()
