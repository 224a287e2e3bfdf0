"""A step or a load that does not end is noticed, and one that only slept is not."""

from __future__ import annotations

from specbatch.pipeline.runtime.watchdog import Watchdog
from specbatch.schemas.errors import DeviceLostError, StepHungError
from specbatch.schemas.provenance import TICKS_PER_SEC

DEADLINE_SEC, LOAD_DEADLINE_SEC = 30.0, 100.0


class Host:
    def __init__(self) -> None:
        self.stepping_since: int | None = None
        self.loading_since: int | None = None
        self.given_up: list[DeviceLostError] = []

    def give_up(self, error: DeviceLostError) -> None:
        self.given_up.append(error)


class Bed:
    def __init__(self) -> None:
        self.now = 0
        self.hosts = [Host(), Host()]
        self.watch = Watchdog(self.hosts, DEADLINE_SEC, LOAD_DEADLINE_SEC, lambda: self.now)

    def look_after(self, seconds: float) -> bool:
        """Whether engines were given up at this look."""
        self.now += int(seconds * TICKS_PER_SEC)
        self.watch.check()
        return any(host.given_up for host in self.hosts)


def test_where_nothing_steps_nothing_is_given_up() -> None:
    bed = Bed()
    assert not any(bed.look_after(1000.0) for _ in range(3))


def test_a_step_too_old_at_two_looks_ends_all_engines_with_one_error() -> None:
    bed = Bed()
    bed.hosts[1].stepping_since = 0
    assert not bed.look_after(DEADLINE_SEC - 1.0)
    assert not bed.look_after(1.0), "it may have been asleep with the whole process"
    assert bed.look_after(1.0)
    for host in bed.hosts:  # the other one would wait for the gate for ever
        (error,) = host.given_up
        assert isinstance(error, StepHungError)
        assert not error.blameless, "its input may be the cause"
        assert "has not ended for 30 s (SPECBATCH_STEP_DEADLINE_SEC)" in str(error)


def test_a_process_that_slept_in_a_step_wakes_up_in_an_old_one_and_goes_on() -> None:
    bed = Bed()
    bed.hosts[0].stepping_since = 0
    assert not bed.look_after(3600.0)
    bed.hosts[0].stepping_since = bed.now  # it ended; the next one began
    assert not bed.look_after(20.0)
    assert not bed.look_after(20.0), "this one is old for the first time"
    bed.hosts[0].stepping_since = None
    assert not bed.look_after(20.0)


def test_a_load_has_a_longer_deadline_of_its_own() -> None:
    bed = Bed()
    bed.hosts[0].loading_since = 0
    assert not bed.look_after(LOAD_DEADLINE_SEC - 1.0)
    assert not bed.look_after(1.0)
    assert bed.look_after(1.0)
    for host in bed.hosts:
        (error,) = host.given_up
        assert isinstance(error, StepHungError)
        assert "has not ended for 100 s (SPECBATCH_LOAD_DEADLINE_SEC)" in str(error)


def test_a_step_behind_a_long_load_is_young() -> None:
    bed = Bed()
    bed.hosts[0].loading_since = 0
    assert not bed.look_after(LOAD_DEADLINE_SEC)
    bed.hosts[0].loading_since, bed.hosts[0].stepping_since = None, bed.now
    assert not any(bed.look_after(10.0) for _ in range(2))
