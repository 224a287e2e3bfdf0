"""Queues by class: their names, who listens to them in which order, what brokers make of it."""

from __future__ import annotations

import threading
from pathlib import Path

from celery import Celery
from celery.worker import WorkController, state

from specbatch.schemas.records import DueWork, Stage
from specbatch.schemas.routing import queue_for
from specbatch.schemas.settings import Settings
from specbatch.workers.app import make_app, make_enqueue, make_queue_length
from specbatch.workers.guard import WORK_TASK
from specbatch.workers.lifecycle import queue_names

JOB = "0123456789abcdef"
HIGH, NORMAL, LOW = range(3)


def test_names_of_queues_stay_as_people_know_them() -> None:
    assert queue_for(Stage.INGEST, None) == "ingest"
    assert queue_for(Stage.PUBLISH, None, LOW) == "record.low"
    assert queue_for(Stage.VERIFY, "/models/big") == "verify.91dd29a64567"
    assert queue_for(Stage.VERIFY, "/models/big", HIGH) == "verify.91dd29a64567.high"
    assert queue_for(Stage.PROPOSE, "/models/big", LOW) == "propose.91dd29a64567.low"


def test_a_worker_listens_to_all_classes_of_its_kinds_the_higher_ones_first() -> None:
    names = queue_names(("ingest", "verify", "record"), "v", None)
    verify = queue_for(Stage.VERIFY, "v")
    assert names == [
        "ingest.high", "ingest", "ingest.low",
        "record.high", "record", "record.low",
        f"{verify}.high", verify, f"{verify}.low",
    ]  # fmt: skip


def heard(app: Celery, messages: list[DueWork]) -> list[tuple[str, int | None]]:
    """(stage, group) of the messages in the order in which one worker's only thread hears them."""
    found: list[tuple[str, int | None]] = []
    all_heard = threading.Event()

    @app.task(name=WORK_TASK, shared=False)  # type: ignore[untyped-decorator] # celery has no types
    def work(job_id: str, stage: str, group_index: int | None) -> None:
        assert job_id == JOB
        found.append((stage, group_index))
        if len(found) == len(messages):
            all_heard.set()

    app.set_default()
    ring = make_enqueue(app)
    for message in messages:
        ring(message)
    controller = WorkController(
        app=app,
        pool_cls="threads",
        concurrency=1,
        queues=queue_names(("ingest", "verify"), "v", None),
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )
    thread = threading.Thread(target=controller.start, daemon=True)
    thread.start()
    try:
        assert all_heard.wait(120), f"only {found}"
    finally:
        state.should_stop = 0  # by its own thread: two would take answers of the broker away
        thread.join(30)
        state.should_stop = None
    return found


MESSAGES = [
    *[DueWork(JOB, Stage.VERIFY, index, "v", LOW) for index in range(3)],
    *[DueWork(JOB, Stage.VERIFY, index, "v") for index in range(10, 13)],
    *[DueWork(JOB, Stage.VERIFY, index, "v", HIGH) for index in range(20, 23)],
    DueWork(JOB, Stage.INGEST, None),
]


def test_redis_gives_higher_classes_first(redis_url: str, tmp_path: Path) -> None:
    app = make_app(Settings(broker_url=redis_url, workspace=str(tmp_path)))
    order = heard(app, MESSAGES)
    assert order == [("ingest", None)] + [
        ("verify", index) for index in (20, 21, 22, 10, 11, 12, 0, 1, 2)
    ]


def test_rabbitmq_gives_every_class(rabbit_url: str, tmp_path: Path) -> None:
    """Queues of their own; in which order is the broker's choice, and the store's who is next."""
    app = make_app(Settings(broker_url=rabbit_url, workspace=str(tmp_path)))
    assert len(set(heard(app, MESSAGES))) == len(MESSAGES)


def test_lengths_are_those_of_the_class(redis_url: str, tmp_path: Path) -> None:
    app = make_app(Settings(broker_url=redis_url, workspace=str(tmp_path)))
    ring, queued = make_enqueue(app), make_queue_length(app)
    for message in MESSAGES[:5]:
        ring(message)
    assert [queued(MESSAGES[index])[1] for index in (0, 3, 6)] == [3, 2, 0]
