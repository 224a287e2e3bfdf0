"""`specbatch chaos`: what it prints, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specbatch.jobs.chaos import harness
from specbatch.jobs.chaos.conservation import Census, Report
from specbatch.jobs.chaos.harness import Ran
from specbatch.jobs.chaos.plan import Plan
from specbatch.schemas.crash_points import CrashPoint
from specbatch.schemas.records import JobState

pytestmark = pytest.mark.pipeline  # starts processes


def test_it_tells_what_happens_and_that_the_law_held(cli: Any) -> None:
    done = cli("chaos", "--runs", 2, "--seed", 4)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    plans = [line for line in lines if line.startswith("seed ")]
    assert [line.split(":")[0] for line in plans] == ["seed 4", "seed 5"]
    assert f"at {CrashPoint.VERIFY}" in plans[0]
    assert sum(line.startswith("  ") and "submitted 23 = ok" in line for line in lines) >= 2
    assert lines[-3].startswith("2 runs, ")
    assert "(0 never reached)" in lines[-3]
    assert lines[-2].startswith("submitted ")
    assert lines[-2].endswith("+ cancelled 0 + pending 0")
    assert lines[-1].startswith("each key once")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the next runs find broken, on a site where nothing happens. `faults/test_harness.py`
    proves what a real one finds."""
    violations: list[str] = []

    @contextmanager
    def site(_folder: Path, redis: str, *, workers: int, **_: Any) -> Iterator[Any]:
        def run(plan: Plan) -> Ran:
            reports = [
                Report("job-1", JobState.PARTIAL, Census(23, 20, 3, 0, 0)),
                Report("job-2", JobState.PARTIAL, Census(23, 21, 2, 0, 0), tuple(violations)),
            ]
            assert (redis[:8], workers) == ("redis://", 3)
            return Ran(plan, fired=list(plan.disturbances), reports=reports, restarts=1)

        yield SimpleNamespace(run=run)

    monkeypatch.setattr(harness, "site", site)
    return violations


@pytest.mark.usefixtures("found")
def test_one_line_of_json_says_it_all(cli: Any, redis_url: str) -> None:
    done = cli("chaos", "--runs", 2, "--workers", 3, "--redis", redis_url, "--json")
    assert done.code == 0, done.err
    assert len(done.out.strip().splitlines()) == 1
    report = done.json
    assert (report["runs"], report["jobs"], report["workers_restarted"]) == (2, 4, 2)
    assert (report["submitted"], report["ok"], report["failed"]) == (92, 82, 10)
    assert report["disturbances"] >= 1
    assert (report["never_reached"], report["incidents"], report["violations"]) == (0, 1, [])


def test_a_broken_law_is_the_exit_code(cli: Any, found: list[str]) -> None:
    found.append("a row is gone")
    done = cli("chaos", "--runs", 1, "--workers", 3)
    assert done.code == 1
    assert "BROKEN: job job-2: a row is gone" in done.out
    assert "1 invariants violated, see above" in done.out


def test_without_a_redis_server_it_says_what_is_needed(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    done = cli("chaos")
    assert done.code == 2
    assert "install redis-server" in done.complaint
    assert "--redis" in done.complaint


def test_a_database_that_is_in_use_is_left_alone(cli: Any, redis_url: str) -> None:
    import redis

    client = redis.Redis.from_url(redis_url)
    client.set("somebody", "else's")
    done = cli("chaos", "--redis", redis_url)
    assert done.code == 2
    assert "holds 1 keys" in done.complaint
    assert client.get("somebody") == b"else's"
    client.close()


def test_a_database_out_of_reach_is_named_without_its_password(cli: Any) -> None:
    done = cli("chaos", "--redis", "redis://:secret@127.0.0.1:1/0")
    assert done.code == 2
    assert "cannot be used" in done.complaint
    assert "secret" not in done.err
