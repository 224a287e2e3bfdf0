"""A place where schedules are looked at: files, a store with a clock that tests move, a client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from ledger.builders import Clock

from specbatch.jobs.schedules.definition import Schedule, load_schedule
from specbatch.jobs.schedules.ticker import Ticker
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.pipeline.runtime.client import Client
from specbatch.schemas.records import DueWork, JobState, Stage
from specbatch.schemas.schedules import RunState
from support.databases import sqlite_store

JOB: dict[str, Any] = {
    "input": {"uri": "in/{{ date }}.jsonl"},
    "output": {"uri": "out/{{ logical_time.compact }}"},
    "verifier": "models/verifier",
}


def silent(_work: DueWork) -> None:
    """Nobody listens."""


def at(text: str) -> float:
    """Seconds since the epoch of an ISO time with its offset."""
    given = datetime.fromisoformat(text)
    assert given.tzinfo is not None
    return given.timestamp()


@dataclass
class Site:
    store: Store
    clock: Clock
    folder: Path

    def schedule(self, cron: str, name: str = "nightly", **fields: Any) -> Schedule:
        """A schedule file of this name, read."""
        job = {**JOB, **fields.pop("job", {})}
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump({"cron": cron, **fields, "job": job}))
        return load_schedule(file)

    def ticker(self, **parts: Any) -> Ticker:
        client = Client(self.store, silent, "file:///work")
        return Ticker(**{"store": self.store, "client": client, "clock": self.clock, **parts})

    def tick(self, schedule: Schedule, when: str | float) -> None:
        self.clock.now = when if isinstance(when, float) else at(when)
        self.ticker().tick(schedule)

    def states(self, schedule: Schedule) -> dict[float, RunState]:
        """The states of its times."""
        rows = self.store.schedule_runs(schedule.name, 10_000)
        return {row.logical_at: row.state for row in reversed(rows)}

    def job_of(self, schedule: Schedule, logical_at: float) -> str:
        (row,) = self.store.schedule_runs(schedule.name, logical_at=logical_at)
        assert row.job_id is not None, row
        return row.job_id

    def end(self, job_id: str) -> None:
        """The job is over."""
        work = self.store.claim_job(job_id, Stage.INGEST, "worker", 60.0)
        assert work is not None
        self.store.fail_job(work.lease, "its input was empty")
        assert self.store.get_job(job_id).state is JobState.FAILED


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def site(clock: Clock, tmp_path: Path) -> Site:
    """On SQLite; that PostgreSQL is like it is proved in tests/contracts."""
    return Site(sqlite_store(clock), clock, tmp_path)


@pytest.fixture(params=["sqlite", "postgres"])
def any_site(request: pytest.FixtureRequest, clock: Clock, tmp_path: Path) -> Iterator[Site]:
    if request.param == "sqlite":
        store = sqlite_store(clock)
    else:
        store = open_store(request.getfixturevalue("postgres_url"), clock=clock)
    yield Site(store, clock, tmp_path)
    store.close()


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a schedule file; a value of None leaves its field out."""

    def writing(name: str = "nightly.yaml", **fields: Any) -> Path:
        values = {"cron": "30 2 * * *", "job": JOB, **fields}
        file = tmp_path / name
        said = {key: value for key, value in values.items() if value is not None}
        file.write_text(yaml.safe_dump(said))
        return file

    return writing
