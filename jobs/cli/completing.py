"""Ids and names of jobs, for a shell that completes a command line.

A key press must not wait: only a store in a file is asked, without importing SQLAlchemy.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from urllib.parse import quote

from specbatch.schemas.errors import SpecbatchError
from specbatch.schemas.sqlite_urls import file_of_url
from specbatch.schemas.visible import one_line

MOST_JOBS = 50  # newest first
LATEST = "latest"
_WAIT_SEC = 0.2


def jobs_beginning(incomplete: str) -> list[tuple[str, str]]:
    """(what to complete to, what it is) of the newest jobs whose id or name begins so."""
    found: dict[str, str] = {}
    with suppress(SpecbatchError, sqlite3.Error, OSError):
        for job_id, name, state in _newest():
            found.setdefault(LATEST, "the newest job")
            found.setdefault(job_id, one_line(f"{name}, {state}"))
            if not any(character.isspace() for character in name):
                found.setdefault(name, f"{state}, {job_id}")
    return [(word, help) for word, help in found.items() if word.startswith(incomplete)]


def _newest() -> list[tuple[str, str, str]]:
    from specbatch.jobs.cli.stores import found_settings

    file = file_of_url(found_settings().store_url)
    if file is None:
        return []
    uri = f"file:{quote(str(file))}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True, timeout=_WAIT_SEC)) as database:
        return database.execute(
            "SELECT job_id, name, state FROM jobs ORDER BY created_at DESC LIMIT ?", (MOST_JOBS,)
        ).fetchall()
