"""Sweepers add the messages that are missing, and no more, however many of them there are."""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

import pytest
from ledger.builders import JOB, LEASE_SEC, Clock, new_group, new_job, position

from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.runtime.sweeper import ACCEPTANCE_DAYS, QueueLength, Sweeper
from specbatch.schemas.errors import StoreError
from specbatch.schemas.records import DueWork, Stage
from specbatch.schemas.timekeeping import Device, NewSession
from support.databases import sqlite_store

GROUPS = 20


@pytest.fixture
def store() -> SqlStore:
    """`GROUPS` groups wait to be verified."""
    opened = sqlite_store(Clock())
    opened.create_job(new_job())
    work = opened.claim_job(JOB, Stage.INGEST, "i", LEASE_SEC)
    assert work is not None
    groups = [new_group(index) for index in range(GROUPS)]
    opened.add_groups(work.lease, groups, [], GROUPS * 4, position())
    opened.finish_ingest(work.lease, GROUPS * 4, {})
    return opened


class Queue:
    """A broker's queue for each stage."""

    def __init__(self) -> None:
        self.messages: list[DueWork] = []

    def __call__(self, message: DueWork) -> tuple[str, int]:
        return str(message.stage), sum(one.stage is message.stage for one in self.messages)


def sweeper(store: SqlStore, queue: Queue, queued: QueueLength) -> Sweeper:
    return Sweeper(store, queue.messages.append, 5.0, 60.0, 30.0, queued)


def test_many_sweepers_enqueue_once_what_waits(store: SqlStore) -> None:
    queue = Queue()
    assert [sweeper(store, queue, queue).sweep() for _ in range(8)] == [GROUPS, *[0] * 7]
    assert Counter(message.group_index for message in queue.messages) == Counter(range(GROUPS))


def test_messages_that_were_lost_are_enqueued_again(store: SqlStore) -> None:
    queue = Queue()
    sweeper(store, queue, queue).sweep()
    del queue.messages[5:]
    assert sweeper(store, queue, queue).sweep() == GROUPS - 5
    queue.messages.clear()
    assert sweeper(store, queue, queue).sweep() == GROUPS


def test_one_sweeper_is_patient_with_its_own_messages(store: SqlStore) -> None:
    queue = Queue()
    one = sweeper(store, queue, queue)
    assert one.sweep() == GROUPS
    queue.messages.clear()
    assert one.sweep() == 0, "workers may have taken them"


def test_where_nothing_is_queued_its_own_messages_are_sent_again_soon_and_ever_later(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("specbatch.pipeline.runtime.sweeper.time.monotonic", lambda: now[0])
    queue = Queue()
    one = sweeper(store, queue, queue)
    enqueued = []
    for _ in range(60):  # everything that is enqueued gets lost
        if one.sweep():
            enqueued.append(now[0] - 1000.0)
        queue.messages.clear()
        now[0] += 1.0
    assert enqueued == [0.0, 2.0, 6.0, 14.0, 30.0]


def test_a_message_that_may_still_be_queued_is_waited_for(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("specbatch.pipeline.runtime.sweeper.time.monotonic", lambda: now[0])
    queue = Queue()
    one = sweeper(store, queue, queue)
    assert one.sweep() == GROUPS
    del queue.messages[1:]
    now[0] += 29.0
    assert one.sweep() == 0
    now[0] += 1.0
    assert one.sweep() == GROUPS - 1


def test_sweeps_come_sooner_while_messages_get_lost(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("specbatch.pipeline.runtime.sweeper.time.monotonic", lambda: now[0])
    queue = Queue()
    one = sweeper(store, queue, queue)
    one.sweep()
    assert one.wait_sec == 5.0
    for _ in range(3):
        queue.messages.clear()
        now[0] += 40.0
        one.sweep()
    assert one.wait_sec == 1.0
    for _ in range(3):
        one.sweep()
    assert one.wait_sec == 5.0


def test_queues_are_counted_apart(store: SqlStore) -> None:
    queue = Queue()
    queue.messages = [DueWork(JOB, Stage.RECORD, index) for index in range(GROUPS)]
    assert sweeper(store, queue, queue).sweep() == GROUPS


def test_where_lengths_are_not_known_all_is_enqueued(store: SqlStore) -> None:
    queue = Queue()
    for _ in range(2):
        assert Sweeper(store, queue.messages.append, 5.0, 60.0).sweep() == GROUPS


def test_old_acceptance_is_forgotten_once_a_day(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    monkeypatch.setattr(store, "forget_old_acceptance", kept.append)
    one = sweeper(store, Queue(), Queue())
    one.sweep()
    one.sweep()
    assert kept == [ACCEPTANCE_DAYS]


@pytest.mark.parametrize(
    "broken",
    [
        *("skip_proposals", "stop_overdue", "close_over", "end_silent_sessions"),
        "forget_old_acceptance",
    ],
)
def test_a_part_that_fails_keeps_no_work_from_being_enqueued(
    store: SqlStore,
    broken: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise StoreError("one job cannot be read")

    monkeypatch.setattr(store, broken, refuse)
    queue = Queue()
    with pytest.raises(StoreError, match="one job cannot be read"):
        sweeper(store, queue, queue).sweep()
    assert len(queue.messages) == GROUPS
    assert "will retry at the next sweep: one job cannot be read" in caplog.text
    assert broken not in caplog.text, "it says what it could not do, not how the code is called"


def test_one_that_is_closed_begins_no_other_part(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part may wait for a database that is out of reach, and `close` waits for them."""
    queue = Queue()
    one = sweeper(store, queue, queue)

    def closed_meanwhile(_: float) -> NoReturn:
        one.close()
        raise StoreError("the database did not answer in time")

    monkeypatch.setattr(store, "skip_proposals", closed_meanwhile)
    with pytest.raises(StoreError):
        one.sweep()
    assert queue.messages == []


def test_workers_that_nobody_hears_of_are_paid_for_no_longer(
    store: SqlStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.begin_session(NewSession("s", "w", Device("cpu", "local", "spot", 1), 0))
    sweeping = Sweeper(store, lambda _: None, 5.0, 60.0, silence_sec=0.0)
    sweeping.sweep()
    assert store.sessions()[0].ended_at is not None
    assert "session s ends" in caplog.text


def test_one_that_was_never_started_can_be_closed(store: SqlStore) -> None:
    queue = Queue()
    sweeper(store, queue, queue).close()
