"""How a process holds its work back while a place refuses to be written."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pytest

from specbatch.pipeline.runtime.outage import FIRST_SEC, LONGEST_SEC, Outage
from specbatch.schemas.errors import ObjectError, StoreError
from specbatch.schemas.refusals import LOG_EVERY_SEC, RefusalLog, should_log

FULL = ObjectError("cannot write /data/x: no space left on device", refused=True, place="/data/x")


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Attempt:
    """Fails until there is space."""

    outage: Outage
    clock: Clock
    failures: int
    tried_at: list[float] = field(default_factory=list)

    def __call__(self) -> None:
        self.tried_at.append(self.clock.now)
        if len(self.tried_at) <= self.failures:
            raise FULL


def test_tries_are_ever_further_apart_up_to_a_minute() -> None:
    clock = Clock()
    outage = Outage(clock=clock)
    waits = []
    for _ in range(9):
        outage.begin(FULL)
        outage.begin(FULL)  # another task of the same try
        waits.append(outage._pause.until - clock.now)
        clock.now = outage._pause.until
    assert waits[:4] == [FIRST_SEC, 2 * FIRST_SEC, 4 * FIRST_SEC, 8 * FIRST_SEC]
    assert waits[-1] == LONGEST_SEC


def test_what_was_not_given_back_is_before_anything_else_is_tried() -> None:
    clock = Clock()
    outage = Outage(clock=clock)
    first = Attempt(outage, clock, failures=0)
    outage.begin(FULL, {"lease": first})
    outage.over()
    assert outage.refused is FULL, "it is not over before the pause is"
    clock.now += FIRST_SEC
    assert outage.wait()
    assert len(first.tried_at) == 1
    outage.over()
    assert outage.refused is None


def test_one_job_s_output_holds_back_that_job_alone() -> None:
    clock = Clock()
    outage = Outage(clock=clock)
    outage.begin_of_job("a", FULL)
    assert outage.holds_back("a")
    assert not outage.holds_back("b")
    assert outage.wait()
    clock.now += FIRST_SEC
    assert not outage.holds_back("a")


def test_a_local_run_ends_at_the_first_refusal(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage(ends=True)
    outage.begin_of_job("a", FULL)
    assert not outage.wait()
    assert outage.refused is FULL
    assert not caplog.records


def test_refusals_are_logged_once_a_minute_and_other_errors_always() -> None:
    clock = Clock()
    should_log = RefusalLog(clock)
    away = StoreError("away")
    assert [should_log(error) for error in (FULL, FULL, away, away)] == [True, False, True, True]
    clock.now += LOG_EVERY_SEC
    assert should_log(FULL)


def test_each_place_that_refuses_is_named() -> None:
    clock = Clock()
    should_log = RefusalLog(clock)
    of_store = StoreError("the database refused: disk is full", refused=True)
    other = ObjectError(
        "cannot write /out/b/part-1: disk full", refused=True, place="/out/b/part-1"
    )
    beside = ObjectError("cannot write /data/y: disk full", refused=True, place="/data/y")
    assert [should_log(FULL), should_log(other), should_log(of_store)] == [True, True, True]
    assert [should_log(beside), should_log(other), should_log(of_store)] == [False, False, False]
    clock.now += LOG_EVERY_SEC
    assert [should_log(beside), should_log(FULL), should_log(other)] == [True, False, True]


def test_places_that_are_remembered_are_bounded_and_forgotten() -> None:
    clock = Clock()
    should_log = RefusalLog(clock)

    def full(number: int) -> ObjectError:
        return ObjectError("disk full", refused=True, place=f"/out/{number}/part-0")

    told = sum(should_log(full(number)) for number in range(1000))
    assert 1 < told < 1000
    assert len(should_log._logged_at) == told
    clock.now += LOG_EVERY_SEC
    assert should_log(full(999)), "its turn has come"
    assert len(should_log._logged_at) == 1


def test_closing_lets_those_go_that_wait(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage(clock=Clock())
    with caplog.at_level(logging.ERROR):
        outage.begin(FULL)
    assert should_log(StoreError("away"))
    outage.close()
    assert not outage.wait()
