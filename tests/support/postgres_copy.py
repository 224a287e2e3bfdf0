"""Copies a store on PostgreSQL and restores it, as an operator does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg

from specbatch.jobs.chaos.harness import StoreCopy


class PostgresCopy(StoreCopy):
    """Copies a database as a template, and disconnects all clients for that."""

    def __init__(self, url: str) -> None:
        parsed = urlsplit(url)
        self._name = parsed.path.removeprefix("/")
        self._copied = f"{self._name}_copy"
        self._server = urlunsplit(parsed._replace(scheme="postgresql", path="/postgres"))

    def take(self) -> None:
        with self._connected() as server, self._alone(server):
            server.execute(f'DROP DATABASE IF EXISTS "{self._copied}"')
            server.execute(f'CREATE DATABASE "{self._copied}" TEMPLATE "{self._name}"')

    def restore(self, *, at_work: bool) -> None:  # noqa: ARG002 - the same for both
        with self._connected() as server:
            with self._alone(server):
                server.execute(f'ALTER DATABASE "{self._name}" RENAME TO "{self._name}_old"')
            server.execute(f'CREATE DATABASE "{self._name}" TEMPLATE "{self._copied}"')
            server.execute(f'DROP DATABASE "{self._name}_old" WITH (FORCE)')

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Any]:
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
