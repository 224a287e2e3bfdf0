"""Nonsense is written into the broker, or it goes away: workers go on, or say that they cannot."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis as redis_client

from specbatch.schemas.records import Stage
from specbatch.schemas.routing import queue_for
from support import forks
from support.models import tiny_llama
from support.servers import PrivateRedis, free_port
from support.workers import END_SEC, WAIT_SEC, WorkerProcess, wait_until, worker

ROWS = 24
LONG_AGO = 1.0  # a score in the index of what is unacknowledged: past every visibility timeout


class Place:
    """A folder with a model, prompts, a store, and a Redis of its own."""

    def __init__(self, home: Path, redis: PrivateRedis, stack: ExitStack) -> None:
        self.home = home
        self.model = str(tiny_llama(home / "model", vocab_size=300, hidden=32, layers=2, heads=2))
        rows = {"prompt": [f"prompt number {i}" for i in range(ROWS)]}
        pq.write_table(pa.table(rows), home / "prompts.parquet")
        self.redis = redis
        self.client = redis_client.Redis.from_url(redis.url)
        self.verify_queue = queue_for(Stage.VERIFY, self.model)
        self.environment = {
            "SPECBATCH_WORKSPACE": str(home / "specbatch-data"),
            "SPECBATCH_BROKER_URL": redis.url,
            "SPECBATCH_SWEEP_INTERVAL_SEC": "0.5",
            "SPECBATCH_LEASE_SEC": "6",
        }
        self._stack = stack

    def worker(self, **settings: str) -> WorkerProcess:
        """One that does everything, once it listens."""
        return self._stack.enter_context(
            worker(
                *("all", "--verifier", self.model, "--concurrency", "4"),
                environment=self.environment | settings,
                cwd=self.home,
            )
        )

    def run(self, *arguments: str) -> Any:
        return forks.run(*arguments, environment=self.environment, cwd=self.home, timeout=WAIT_SEC)

    def job(self, output: str) -> Any:
        """A job that is waited for, and not for ever."""
        return self.run(
            *("submit-job", "--input", "prompts.parquet", "--output", output),
            *("--verifier", self.model, "--dtype", "float32", "--max-tokens", "8"),
            *("--group-size", "4", "--wait", "--timeout", "120"),
        )

    def shown(self, *arguments: str) -> dict[str, Any]:
        done = self.run("specbatch", *arguments, "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))


@pytest.fixture
def place(tmp_path: Path, own_redis: PrivateRedis) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(tmp_path, own_redis, stack)


def said(one: WorkerProcess, words: str) -> list[str]:
    """Lines of its log with these words."""
    return [line for line in one.text().splitlines() if words in line]


def test_garbage_among_unacknowledged_messages_is_dropped(place: Place) -> None:
    garbage = ["garbage", "[1,2]", '[{"no":"message"},"","record"]', "[]"]
    tags = [f"evil-{number}" for number in range(len(garbage))]
    for tag, value in zip(tags, garbage, strict=True):
        place.client.hset("unacked", tag, value)
        place.client.zadd("unacked_index", {tag: LONG_AGO})
    place.client.zadd("unacked_index", {"gone": LONG_AGO})
    one = place.worker()
    done = place.job("out")
    assert done.returncode == 0, done.stderr + one.text()[-3000:]
    for tag in (*tags, "gone"):
        wait_until(
            "it is dropped", lambda tag=tag: place.client.zscore("unacked_index", tag) is None
        )
        assert not place.client.hexists("unacked", tag)
    for tag in tags:
        assert len(said(one, f"unacknowledged message '{tag}' is dropped")) == 1
    assert "Traceback" not in one.text()


def test_garbage_in_queues_is_dropped(place: Place) -> None:
    bad = [
        b"garbage",
        b"\xff\xfe",
        b"5",
        b"{}",
        b"[" * 100_000,
        b'{"properties": {}}',
        b"x" * 2**21,
    ]
    unread = json.dumps(
        {
            "body": "!", "headers": {}, "content-type": "application/json",
            "properties": {
                "delivery_tag": [1], "body_encoding": "rot13",
                "delivery_info": {"exchange": "", "routing_key": "ingest"},
            },
        }
    )  # fmt: skip
    for queue in ("ingest", "record", place.verify_queue):
        place.client.rpush(queue, *bad, unread)
    one = place.worker()
    done = place.job("out")
    assert done.returncode == 0, done.stderr + one.text()[-3000:]
    for queue in ("ingest", "record", place.verify_queue):
        assert place.client.llen(queue) == 0
        assert len(said(one, f"a message in queue '{queue}' is dropped")) == len(bad) + 1
    assert "Traceback" not in one.text()
    assert said(one, "no messages can be taken") == []


def test_keys_of_another_type_are_moved_aside(place: Place) -> None:
    keys = ["unacked", "unacked_index", "ingest", "record", place.verify_queue]
    for key in (*keys, *(f"_kombu.binding.{key}" for key in keys)):
        place.client.set(key, "not what you think")
    one = place.worker()
    done = place.job("out")
    assert done.returncode == 0, done.stderr + one.text()[-3000:]
    for key in keys:
        assert place.client.get(f"{key}.quarantined") == b"not what you think"
        assert said(one, f"key '{key}' of the broker was a string")
    assert "Traceback" not in one.text()


def test_keys_of_another_type_under_a_worker_at_work_are_moved_aside(place: Place) -> None:
    one = place.worker()
    assert place.job("first").returncode == 0
    for key in ("unacked", "unacked_index", "ingest", "record", place.verify_queue):
        place.client.delete(key)
        place.client.set(key, "evil")
    done = place.job("second")
    assert done.returncode == 0, done.stderr + one.text()[-3000:]
    assert "Traceback" not in one.text()


def test_a_worker_ends_when_it_can_take_no_messages_for_long(place: Place) -> None:
    one = place.worker(SPECBATCH_BROKER_RECONNECTS="4")
    assert place.job("out").returncode == 0
    place.redis.kill()
    assert one.process.wait(END_SEC) == 7, one.text()[-3000:]
    error = said(one, "error:")[-1]
    assert "no messages could be taken from the broker" in error
    assert "in 4 attempts" in error
    assert "Traceback" not in one.text()


def test_a_worker_that_can_take_no_messages_says_so(place: Place) -> None:
    port = free_port()
    one = place.worker(SPECBATCH_METRICS_PORT=str(port), SPECBATCH_METRICS_ADDRESS="127.0.0.1")
    wait_until("it is well", lambda: health(port) == (200, "ok\n"), [one])
    place.redis.kill()
    wait_until("it is not", lambda: health(port)[0] == 503, [one])
    assert "cannot take messages from the broker" in health(port)[1]
    wait_until("both processes tell the store", lambda: able(place) == [False, False], [one])
    assert "can take no messages: " in place.run("specbatch", "top", "--once").stdout
    place.redis.start()
    wait_until("it is well again", lambda: health(port) == (200, "ok\n"), [one])
    wait_until("the store knows", lambda: able(place) == [True, True], [one])
    one.end()
    assert able(place) == [], "who has ended is not there"


def test_a_worker_is_not_well_before_it_has_connected(place: Place) -> None:
    port = free_port()
    place.redis.kill()
    one = place.worker(SPECBATCH_METRICS_PORT=str(port), SPECBATCH_METRICS_ADDRESS="127.0.0.1")
    answers: list[int] = []

    def fails_to_connect() -> bool:
        if status := health(port)[0]:
            answers.append(status)
        return len(said(one, "no messages can be taken")) >= 2

    wait_until("it tried", fails_to_connect, [one])
    assert set(answers) == {503}
    place.redis.start()
    wait_until("it is well", lambda: health(port) == (200, "ok\n"), [one])


def able(place: Place) -> list[bool]:
    return [process["can_consume"] for process in place.shown("top")["processes"]]


def health(port: int) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""
