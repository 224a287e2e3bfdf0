"""When a worker counts as one that can take messages."""

from __future__ import annotations

from specbatch.workers.consumer import (
    MOST_PAUSE_SEC,
    NOT_YET,
    SETTLED_SEC,
    STEADY_SEC,
    STUCK_SEC,
    Consuming,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_can_once_its_consumer_runs() -> None:
    clock = Clock()
    one = Consuming(clock=clock)
    assert one.trouble() == NOT_YET
    one.runs()
    assert one.trouble() == NOT_YET, "it may fail at the first read"
    clock.now += SETTLED_SEC
    assert one.trouble() is None


def test_a_lost_connection_is_trouble_until_the_next_one_lasts() -> None:
    clock = Clock()
    one = Consuming(clock=clock)
    one.runs()
    one.failed(OSError("connection refused\nand more"))
    assert one.trouble() == "connection refused"
    one.runs()
    assert one.trouble() == "connection refused", "it may fail at the first read"
    clock.now += SETTLED_SEC
    assert one.trouble() is None


def test_failures_are_counted_until_one_connection_was_steady() -> None:
    clock = Clock()
    one = Consuming(clock=clock)
    for expected in (1, 2, 3):
        one.runs()
        clock.now += STEADY_SEC / 2
        assert one.failed(OSError("gone")) == expected
    one.runs()
    clock.now += STEADY_SEC
    assert one.failed(OSError("gone")) == 1


def test_attempts_come_further_and_further_apart() -> None:
    one = Consuming(clock=Clock())
    pauses = []
    for _ in range(12):
        one.failed(OSError("gone"))
        pauses.append(one.pause_sec)
    assert pauses == sorted(pauses)
    assert pauses[-1] == MOST_PAUSE_SEC
    assert pauses[0] < 1.0


def test_a_loop_that_turns_no_more_takes_nothing() -> None:
    clock = Clock()
    one = Consuming(clock=clock)
    one.runs()
    one.turned()
    clock.now += STUCK_SEC
    assert one.trouble() is None
    clock.now += 1.0
    assert one.trouble() == "the broker does not answer"
    one.turned()
    assert one.trouble() is None
