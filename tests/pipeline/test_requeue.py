"""Work messages that a worker of another numeric class took go back to the queue."""

from __future__ import annotations

import pytest
from contracts.shorthand import F32, TORCH, claim, ingest, serving
from ledger.builders import JOB, LEASE_SEC, Clock

from specbatch.pipeline.runtime.sweeper import FRESH_SEC, Requeuer
from specbatch.schemas.numeric_class import UNKNOWN
from specbatch.schemas.records import DueWork, Stage
from specbatch.schemas.timekeeping import Device, NewSession
from support.databases import sqlite_store

SILENCE_SEC = 3 * LEASE_SEC


class Bed:
    """A store with a job of two groups, and what is sent again."""

    def __init__(self, numeric_class: str | None = F32) -> None:
        self.clock = Clock()
        self.store = sqlite_store(self.clock)
        self.enqueued: list[DueWork] = []
        ingest(self.store, groups=2, numeric_class=numeric_class)
        self.requeuer = Requeuer(
            self.store, self.enqueued.append, SILENCE_SEC, every_sec=0.0, clock=self.clock
        )

    def announce(self, name: str) -> None:
        device = Device("cpu", "here", "owned", 1)
        self.store.begin_session(NewSession(name, name, device, 0, serving(name)))


@pytest.fixture
def bed() -> Bed:
    bed = Bed()
    bed.announce(F32)
    return bed


def test_a_message_for_another_class_goes_back(bed: Bed) -> None:
    bed.requeuer.requeue(JOB, serving(TORCH))
    assert bed.enqueued == [DueWork(JOB, Stage.VERIFY, 0, "big")]


def test_one_for_the_own_class_was_a_double(bed: Bed) -> None:
    bed.requeuer.requeue(JOB, serving(F32))
    assert bed.enqueued == []


def test_one_for_a_job_that_is_gone_goes_nowhere(bed: Bed) -> None:
    bed.requeuer.requeue("nosuchjob", serving(TORCH))
    assert bed.enqueued == []


@pytest.mark.parametrize("name", [None, UNKNOWN])
def test_one_that_anybody_may_take_was_a_double(name: str | None) -> None:
    bed = Bed(name)
    bed.requeuer.requeue(JOB, serving(TORCH))
    assert bed.enqueued == []


def test_one_whose_groups_are_all_held_goes_nowhere(bed: Bed) -> None:
    claim(bed.store, 0)
    bed.requeuer.requeue(JOB, serving(TORCH))
    assert [message.group_index for message in bed.enqueued] == [1]
    claim(bed.store, 1)
    bed.requeuer.requeue(JOB, serving(TORCH))
    assert len(bed.enqueued) == 1


def test_one_that_nobody_alive_may_take_is_left_to_the_sweeper(bed: Bed) -> None:
    bed.clock.advance(SILENCE_SEC + 1)
    bed.requeuer.requeue(JOB, serving(TORCH))
    assert bed.enqueued == []
    bed.store.end_silent_sessions(0.0)
    bed.store.begin_session(
        NewSession("new", "new", Device("cpu", "here", "owned", 1), 0, serving(F32))
    )
    bed.requeuer.requeue(JOB, serving(TORCH))
    assert bed.enqueued == [], "who is alive is not asked for every message"
    bed.clock.advance(FRESH_SEC)
    bed.requeuer.requeue(JOB, serving(TORCH))
    assert len(bed.enqueued) == 1
