"""`specbatch chaos`: what it prints, and how it ends."""

from __future__ import annotations

from typing import Any

import pytest

from specbatch.jobs.chaos import harness
from specbatch.jobs.chaos.conservation import Report
from specbatch.schemas.crash_points import CrashPoint

pytestmark = pytest.mark.pipeline  # starts processes


def test_it_tells_what_happens_and_that_the_law_held(cli: Any) -> None:
    done = cli("chaos", "--runs", 3, "--seed", 4)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    plans = [line for line in lines if line.startswith("seed ")]
    assert [line.split(":")[0] for line in plans] == ["seed 4", "seed 5", "seed 6"]
    assert f"at {CrashPoint.VERIFY}" in plans[0]
    assert sum(line.startswith("  ") and "submitted 23 = ok" in line for line in lines) >= 3
    assert lines[-3].startswith("3 runs, ")
    assert "(0 never reached)" in lines[-3]
    assert lines[-2].startswith("submitted ")
    assert lines[-2].endswith("+ cancelled 0 + pending 0")
    assert lines[-1].startswith("each key once")


def test_one_line_of_json_says_it_all(cli: Any, redis_url: str) -> None:
    done = cli("chaos", "--runs", 1, "--workers", 3, "--redis", redis_url, "--json")
    assert done.code == 0, done.err
    assert len(done.out.strip().splitlines()) == 1
    report = done.json
    assert report["runs"] == 1
    assert report["submitted"] == 23 * report["jobs"] == report["ok"] + report["failed"]
    assert report["disturbances"] >= 1
    assert report["violations"] == []


def test_a_broken_law_is_the_exit_code(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = harness.report

    def broken(*arguments: Any) -> Report:
        found = whole(*arguments)
        return Report(found.job_id, found.state, found.census, ("a row is gone",))

    monkeypatch.setattr(harness, "report", broken)
    done = cli("chaos", "--runs", 1)
    assert done.code == 1
    assert "BROKEN: job" in done.out
    assert "a row is gone" in done.out
    assert "invariants violated, see above" in done.out


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
