"""Redis and PostgreSQL of a benchmark's own: the tests' private servers, PostgreSQL with its syncs.

Only from a checkout, with `tests` on the path, as the Makefile has it.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from support.servers import PrivatePostgres, PrivateRedis

_LIBRARIES = ("specbatch", "celery", "kombu", "redis", "sqlalchemy", "psycopg", "pyarrow")


class SyncedPostgres(PrivatePostgres):
    """As in earnest: a commit survives a power cut. With room for as many clients as we start."""

    def command(self) -> list[str]:
        options = {"fsync": "on", "full_page_writes": "on", "shared_buffers": "128MB"}
        options["max_connections"] = "300"
        settings = (word for key, value in options.items() for word in ("-c", f"{key}={value}"))
        return [*super().command(), *settings]  # of two words on one setting the last one counts


@dataclass(frozen=True, slots=True)
class Servers:
    """Both, running."""

    redis: PrivateRedis
    postgres: PrivatePostgres

    @property
    def facts(self) -> dict[str, Any]:
        """The machine and every version that matters, and no names."""
        binaries = {"redis-server": self.redis, "postgres": self.postgres}
        return {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _LIBRARIES},
            **{name: _version(server.command()[0]) for name, server in binaries.items()},
            "postgres_synced": isinstance(self.postgres, SyncedPostgres),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }


@contextmanager
def servers(synced: bool = True) -> Iterator[Servers]:
    """Started, and gone at the end. `synced` False: no waiting for the disk."""
    with PrivateRedis() as redis, (SyncedPostgres if synced else PrivatePostgres)() as postgres:
        yield Servers(redis, postgres)


def postgres_counts(url: str) -> dict[str, int]:
    """Transactions and connections of a database so far, those that ask included."""
    query = (
        "SELECT xact_commit + xact_rollback, sessions FROM pg_stat_database"
        " WHERE datname = current_database()"
    )
    with psycopg.connect(url) as connection:
        found = connection.execute(query).fetchone()
    assert found is not None, "every database has a row"
    return {"transactions": int(found[0]), "connections": int(found[1])}


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(found, platform.processor())


def _version(binary: str) -> str:
    done = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.strip()
