"""A proposer leaves a job after enough bad replans, and comes back after a time that grows."""

from __future__ import annotations

from specbatch.pipeline.policy.breaker import Breaker
from specbatch.pipeline.policy.tuning import FIRST_OPEN_STEPS, LONGEST_OPEN_STEPS, STRIKES
from specbatch.schemas.speculation import DecisionAction


def struck_out(breaker: Breaker, step: int) -> None:
    """As many bad replans as it takes, all at `step`."""
    verdicts = [breaker.record(step, pays=False) for _ in range(STRIKES)]
    assert verdicts == [None] * (STRIKES - 1) + [DecisionAction.DISABLED]


def test_one_bad_look_is_not_enough_and_a_good_one_clears_the_slate() -> None:
    breaker = Breaker()
    for step in range(20):
        for _ in range(STRIKES - 1):
            assert breaker.record(step, pays=False) is None
        assert breaker.record(step, pays=True) is None
        assert breaker.open_until is None
    struck_out(breaker, 20)
    assert breaker.open_until == 20 + FIRST_OPEN_STEPS


def test_it_rests_until_the_very_step_and_wakes_once() -> None:
    breaker = Breaker()
    struck_out(breaker, 100)
    last = 100 + FIRST_OPEN_STEPS - 1
    assert not breaker.half_opens(100)
    assert not breaker.half_opens(last)
    assert breaker.open_until == last + 1
    assert breaker.half_opens(last + 1)
    assert not breaker.half_opens(last + 1)
    assert breaker.open_until is None
    assert not Breaker().half_opens(0), "one that never rested has nothing to wake from"


def test_each_rest_behind_another_is_twice_as_long_up_to_the_longest() -> None:
    breaker, step, at_depth_0 = Breaker(), 0, []
    for _ in range(9):
        struck_out(breaker, step)
        assert breaker.open_until is not None
        at_depth_0.append(breaker.open_until - step)
        step = breaker.open_until
        assert breaker.half_opens(step)
    doubled = [min(FIRST_OPEN_STEPS << i, LONGEST_OPEN_STEPS) for i in range(9)]
    assert at_depth_0 == doubled
    assert at_depth_0[-1] == at_depth_0[-2] == LONGEST_OPEN_STEPS


def test_after_a_rest_a_good_look_is_told_once_and_rests_are_short_again() -> None:
    breaker = Breaker()
    struck_out(breaker, 0)
    assert breaker.half_opens(FIRST_OPEN_STEPS)
    assert breaker.record(300, pays=False) is None, "a strike while it is tried again"
    assert breaker.record(316, pays=True) is DecisionAction.ENABLED
    assert breaker.record(332, pays=True) is None
    struck_out(breaker, 400)
    assert breaker.open_until == 400 + FIRST_OPEN_STEPS


def test_strikes_before_a_rest_do_not_count_after_it() -> None:
    breaker = Breaker(open_until=50, strikes=STRIKES - 1)
    assert breaker.half_opens(50)
    assert breaker.record(50, pays=False) is None
