"""A proposer leaves a job after enough bad looks, and comes back after a rest that grows."""

from __future__ import annotations

from specbatch.pipeline.policy.breaker import (
    FIRST_REST_STEPS,
    LONGEST_REST_STEPS,
    STRIKES,
    Breaker,
)
from specbatch.schemas.speculation import DecisionAction


def struck_out(breaker: Breaker, step: int) -> None:
    """As many bad looks as it takes, all at `step`."""
    verdicts = [breaker.judge(step, pays=False) for _ in range(STRIKES)]
    assert verdicts == [None] * (STRIKES - 1) + [DecisionAction.TAKEN_OUT]


def test_one_bad_look_is_not_enough_and_a_good_one_clears_the_slate() -> None:
    breaker = Breaker()
    for step in range(20):
        for _ in range(STRIKES - 1):
            assert breaker.judge(step, pays=False) is None
        assert breaker.judge(step, pays=True) is None
        assert breaker.allows(step)
    struck_out(breaker, 20)
    assert not breaker.allows(20)


def test_it_rests_until_the_very_step_and_wakes_once() -> None:
    breaker = Breaker()
    struck_out(breaker, 100)
    last = 100 + FIRST_REST_STEPS - 1
    assert not breaker.wakes(100)
    assert not breaker.wakes(last)
    assert not breaker.allows(last)
    assert breaker.allows(last + 1)
    assert breaker.wakes(last + 1)
    assert not breaker.wakes(last + 1)
    assert breaker.allows(last + 1)
    assert not Breaker().wakes(0), "one that never rested has nothing to wake from"


def test_each_rest_behind_another_is_twice_as_long_up_to_the_longest() -> None:
    breaker, step, rests = Breaker(), 0, []
    for _ in range(9):
        struck_out(breaker, step)
        assert breaker.out_until is not None
        rests.append(breaker.out_until - step)
        step = breaker.out_until
        assert breaker.wakes(step)
    doubled = [min(FIRST_REST_STEPS << i, LONGEST_REST_STEPS) for i in range(9)]
    assert rests == doubled
    assert rests[-1] == rests[-2] == LONGEST_REST_STEPS


def test_after_a_rest_a_good_look_is_told_once_and_rests_are_short_again() -> None:
    breaker = Breaker()
    struck_out(breaker, 0)
    assert breaker.wakes(FIRST_REST_STEPS)
    assert breaker.judge(300, pays=False) is None, "a strike while it is tried again"
    assert breaker.judge(316, pays=True) is DecisionAction.TAKEN_IN
    assert breaker.judge(332, pays=True) is None
    struck_out(breaker, 400)
    assert breaker.out_until == 400 + FIRST_REST_STEPS


def test_strikes_before_a_rest_do_not_count_after_it() -> None:
    breaker = Breaker(out_until=50, strikes=STRIKES - 1)
    assert breaker.wakes(50)
    assert breaker.judge(50, pays=False) is None
