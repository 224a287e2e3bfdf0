"""Copies a store and restores it, as an operator does."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

_BUSY_SEC = 60.0  # workers write meanwhile, and one may be frozen during a write


class StoreCopy(Protocol):
    """One copy of a store, which can be taken repeatedly."""

    def take(self) -> None:
        """Copy the store; workers may be running."""
        ...

    def restore(self, *, at_work: bool) -> None:
        """Restore the copy. `at_work`: workers are running and have the store open."""
        ...


def copy_of(database_url: str, folder: Path) -> StoreCopy:
    """A copy of the store at this URL; files go to `folder`."""
    if database_url.startswith("sqlite"):
        return SqliteCopy(Path(database_url.removeprefix("sqlite:///")), folder / "copy.db")
    return PostgresCopy(database_url)


class SqliteCopy:
    """Copies with SQLite's own backup if workers are running, else copies the file."""

    def __init__(self, database: Path, copy: Path) -> None:
        self._database = database
        self._copy = copy

    def take(self) -> None:
        self._copy.unlink(missing_ok=True)
        _back_up(self._database, self._copy)

    def restore(self, *, at_work: bool) -> None:
        if at_work:
            _back_up(self._copy, self._database)
            return
        for suffix in ("-wal", "-shm"):
            self._database.with_name(self._database.name + suffix).unlink(missing_ok=True)
        fresh = self._database.with_suffix(".new")
        shutil.copyfile(self._copy, fresh)
        fresh.replace(self._database)


def _back_up(source: Path, target: Path) -> None:
    with (
        contextlib.closing(sqlite3.connect(source, timeout=_BUSY_SEC)) as reading,
        contextlib.closing(sqlite3.connect(target, timeout=_BUSY_SEC)) as writing,
    ):
        reading.backup(writing)


class PostgresCopy:
    """Copies a database as a template, and disconnects all clients for that."""

    def __init__(self, url: str) -> None:
        parsed = urlsplit(url)
        self._name = parsed.path.removeprefix("/")
        self._copy = f"{self._name}_copy"
        self._server = urlunsplit(parsed._replace(scheme="postgresql", path="/postgres"))

    def take(self) -> None:
        with self._connected() as server, self._alone(server):
            server.execute(f'DROP DATABASE IF EXISTS "{self._copy}"')
            server.execute(f'CREATE DATABASE "{self._copy}" TEMPLATE "{self._name}"')

    def restore(self, *, at_work: bool) -> None:  # noqa: ARG002 - the same for both
        with self._connected() as server:
            with self._alone(server):
                server.execute(f'ALTER DATABASE "{self._name}" RENAME TO "{self._name}_old"')
            server.execute(f'CREATE DATABASE "{self._name}" TEMPLATE "{self._copy}"')
            server.execute(f'DROP DATABASE "{self._name}_old" WITH (FORCE)')

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Any]:
        import psycopg

        with psycopg.connect(self._server, autocommit=True) as connection:
            yield connection

    @contextlib.contextmanager
    def _alone(self, server: Any) -> Iterator[None]:
        """Keep all clients away from the store during the block."""
        name = self._name
        server.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        server.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name]
        )
        for _ in range(200):  # they end a moment later
            left = server.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = %s", [name]
            ).fetchone()
            if not left[0]:
                break
            server.execute("SELECT pg_sleep(0.02)")
        yield
        if server.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name]).fetchone():
            server.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
