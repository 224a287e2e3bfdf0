"""Databases without jobs whose schema is up to date: the migrations make one, the rest are copies.

A migration takes half a second. What migrations do is tested in `ledger/test_migrations.py`.
"""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specbatch.pipeline.ledger.sql.store import SqlStore


def sqlite_store(clock: Callable[[], float] | None = None, **options: Any) -> SqlStore:
    """A store on a database of its own, which goes when the store does."""
    from specbatch.pipeline.ledger.sql.store import SqlStore

    url = new_database()
    store = SqlStore(url, clock=clock, **options)
    folder = Path(url.removeprefix("sqlite:///")).parent
    weakref.finalize(store, shutil.rmtree, folder, ignore_errors=True)
    return store


def new_database() -> str:
    """The URL of a SQLite database of its own, in memory where conftest finds room there."""
    return migrated(Path(mkdtemp(dir=_folder().name)) / "store.db")


def migrated(path: Path) -> str:
    """Make a SQLite database; its URL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_template())
    path.chmod(0o600)  # as one that the program makes
    return f"sqlite:///{path}"


def share_compiled_statements() -> None:
    """All databases of one kind use the same compiled statements, as the connections of one engine
    do. Compiling them again for each test's own database takes a third of the store's tests."""
    from sqlalchemy import Engine
    from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
    from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
    from sqlalchemy.util import LRUCache

    class Compiled:
        """Every engine's cache; what an engine would keep for itself is dropped."""

        shared: Any = LRUCache(4_000)

        def __get__(self, engine: object, _: type) -> Any:
            return self.shared

        def __set__(self, engine: object, own: object) -> None: ...

    dialects: tuple[Any, ...] = (SQLiteDialect_pysqlite, PGDialect_psycopg)
    for dialect in dialects:  # a part of the cache's keys
        dialect.__hash__ = lambda dialect: hash(type(dialect))
        dialect.__eq__ = _is_like
    engine: Any = Engine
    engine._compiled_cache = Compiled()


def _is_like(dialect: Any, other: Any) -> bool:
    """A compiled statement keeps its dialect, and with it the key of the store it was made for."""
    from specbatch.schemas.text_columns import cipher_of

    return type(dialect) is type(other) and cipher_of(dialect) is cipher_of(other)


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(
        prefix="specbatch-stores-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")
    )


@cache
def _template() -> bytes:
    from specbatch.pipeline.ledger.sql.migrate import upgrade

    with TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        upgrade(f"sqlite:///{path}")
        return path.read_bytes()
