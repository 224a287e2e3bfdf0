"""How many messages wait on a real broker."""

from __future__ import annotations

from pathlib import Path

from specbatch.schemas.records import DueWork, Stage
from specbatch.schemas.settings import Settings
from specbatch.workers.app import make_app, make_enqueue, make_queue_length

VERIFY = DueWork("0123456789", Stage.VERIFY, 0, "verifier")
RECORD = DueWork("0123456789", Stage.RECORD, 0)


def check(broker_url: str, folder: Path) -> None:
    app = make_app(Settings(broker_url=broker_url, workspace=str(folder)))
    ring, queued = make_enqueue(app), make_queue_length(app)
    assert queued(VERIFY)[1] == queued(RECORD)[1] == 0
    for _ in range(3):
        ring(VERIFY)
    ring(RECORD)
    assert (queued(VERIFY)[1], queued(RECORD)[1]) == (3, 1)
    assert queued(VERIFY)[0] != queued(RECORD)[0]


def test_messages_are_counted_by_queue_on_redis(redis_url: str, tmp_path: Path) -> None:
    check(redis_url, tmp_path)


def test_messages_are_counted_by_queue_on_rabbitmq(rabbit_url: str, tmp_path: Path) -> None:
    check(rabbit_url, tmp_path)


def test_a_broker_that_is_away_has_none(tmp_path: Path) -> None:
    app = make_app(Settings(broker_url="redis://127.0.0.1:1/0", workspace=str(tmp_path)))
    assert make_queue_length(app)(RECORD)[1] == 0
