"""Trials of sizes that nobody has seen: how far they go, and what they may cost. And controls."""

from __future__ import annotations

import random

import numpy as np
import pytest

from specbatch.pipeline.policy.depth import (
    Candidate,
    Controller,
    DepthSchedule,
    StepCost,
    choose_depths,
)
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.pipeline.policy.tuning import (
    CELL_KNOWN,
    CONTROL_EVERY_STEPS,
    CONTROL_SHARE,
    EXPLORE_EVERY_REPLANS,
    EXPLORE_SHARE,
    EXPLORE_STEPS,
    FIRST_EXPLORE_SEC,
    MOST_SETTLING_STEPS,
    SETTLING_SEC,
    WELL_KNOWN_PASSES,
)

MOST = 16
CANDIDATES = [Candidate(MOST, 0.9)] * 4


def by_token(tokens: int, _sequences: int = 0) -> float:
    """Drafting never pays: each token costs as much as any other."""
    return 1e-3 * tokens


def knowing(passes: int, sequences: int = 4) -> Controller:
    """Of all sizes up to depth 1."""
    knowledge = Knowledge()
    for _ in range(passes):
        for tokens in range(sequences, 2 * sequences + 1):
            knowledge.step_time.observe(tokens, sequences, by_token(tokens))
    return Controller(knowledge)


def tried(course: DepthSchedule) -> tuple[int, ...] | None:
    """Depths that are tried because nobody has seen their size."""
    return course.opening if course.opening_steps == EXPLORE_STEPS else None


def loss_of(depths: tuple[int, ...]) -> float:
    """Seconds that a step of these depths takes longer than its tokens at depth 0."""
    tokens = sum(0.9**j for depth in depths for j in range(depth + 1))
    return by_token(len(depths) + sum(depths)) - by_token(1) * tokens


@pytest.mark.parametrize("others", [0, 3])
def test_a_trial_goes_half_the_way_to_what_an_optimist_would_take(others: int) -> None:
    count = len(CANDIDATES) + others
    controller = knowing(CELL_KNOWN, count)
    courses = [controller.replan(CANDIDATES, others) for _ in range(EXPLORE_EVERY_REPLANS)]
    assert all(course.at_depth_0 for course in courses)
    assert [tried(course) for course in courses[:-1]] == [None] * (EXPLORE_EVERY_REPLANS - 1)
    hoped = controller.knowledge.step_time.curve(count, count, count + 4 * MOST, 1.0)
    far = sum(choose_depths(CANDIDATES, StepCost(hoped), others).depths)
    assert far >= 8
    half = choose_depths(CANDIDATES, StepCost(hoped[: far // 2 + 1]), others)
    assert tried(courses[-1]) == half.depths


def test_once_half_the_way_is_known_a_trial_goes_on_from_there() -> None:
    controller, sizes = knowing(CELL_KNOWN), list[int]()
    for _ in range(4000):
        opening = tried(controller.replan(CANDIDATES))
        if opening is None:
            continue
        tokens = 4 + sum(opening)
        sizes.append(tokens)
        for _ in range(CELL_KNOWN):
            controller.knowledge.step_time.observe(tokens, 4, by_token(tokens))
        for _ in range(20):  # it is drawn again
            controller.knowledge.step_time.observe(4, 4, by_token(4))
    assert len(sizes) >= 2
    assert len(set(sizes)) == len(sizes), "what is known is tried no more"


def test_trials_lose_what_was_put_aside_for_them_and_no_more() -> None:
    controller = knowing(12)
    time = lost = late = 0.0
    while time < 60.0:
        course = controller.replan(CANDIDATES)
        opening = tried(course)
        if opening is not None:
            lost += EXPLORE_STEPS * loss_of(opening)
            late = time
        for step in range(course.steps):
            opens = course.opening is not None and step < course.opening_steps
            depths = course.opening if opens else course.depths
            assert depths is not None
            tokens = 4 + sum(depths)
            controller.knowledge.step_time.observe(tokens, 4, by_token(tokens))
            time += by_token(tokens)
        assert lost <= 1.1 * (FIRST_EXPLORE_SEC + EXPLORE_SHARE * time)
    assert lost > FIRST_EXPLORE_SEC
    assert late > 0.5


def test_only_an_engine_that_knows_little_may_lose_something_at_once() -> None:
    new, old = knowing(CELL_KNOWN), knowing(WELL_KNOWN_PASSES // 5)
    assert old.knowledge.step_time.observations == WELL_KNOWN_PASSES
    assert any(tried(new.replan(CANDIDATES)) for _ in range(EXPLORE_EVERY_REPLANS))
    time, opening = 0.0, None
    while opening is None:
        course = old.replan(CANDIDATES)
        opening, time = tried(course), time + course.steps * by_token(4)
    needed = EXPLORE_STEPS * loss_of(opening) / EXPLORE_SHARE
    assert needed * 0.9 <= time <= needed * 1.1 + EXPLORE_EVERY_REPLANS * course.steps * by_token(4)


def test_a_trial_that_should_win_costs_nothing_of_what_was_put_aside() -> None:
    """A size beyond what was seen, on a machine where drafting pays: it is tried at once."""
    knowledge = Knowledge()
    for _ in range(WELL_KNOWN_PASSES):
        for tokens in (4, 8):
            knowledge.step_time.observe(tokens, 4, 1e-2 + 1e-5 * tokens)
    controller = Controller(knowledge)
    courses = [controller.replan(CANDIDATES) for _ in range(EXPLORE_EVERY_REPLANS)]
    assert tried(courses[-1]) is not None


# --- what is promised ---------------------------------------------------------------------------
def test_others_in_the_step_count_in_what_is_promised() -> None:
    controller, others = knowing(CELL_KNOWN, 7), 3
    for tokens in [*range(7, 40)] * CELL_KNOWN:
        controller.knowledge.step_time.observe(tokens, 7, 1e-2 + 1e-4 * tokens)
    found = controller.promise(CANDIDATES, others)
    tokens = 7 + sum(0.9**j for depth in found.depths for j in range(1, depth + 1))
    assert found.expected_tokens == pytest.approx(tokens)
    seconds = controller.knowledge.step_time.predict(7 + sum(found.depths), 7)
    assert found.expected_sec == pytest.approx(seconds)
    course = controller.replan(CANDIDATES, others)
    assert course.depths == found.depths
    plain = controller.knowledge.step_time.predict(7, 7)
    assert course.gain == pytest.approx(found.tokens_per_sec / (7 / plain))
    assert plain == controller.plain_sec(7)


@pytest.mark.parametrize("seed", range(20))
def test_what_a_token_must_be_worth_is_the_worth_of_the_last_one_taken(seed: int) -> None:
    generator = random.Random(seed)
    candidates = [
        Candidate(generator.randint(0, 6), generator.choice([0.05, 0.4, 0.7, 0.9]))
        for _ in range(generator.randint(1, 5))
    ]
    cost = StepCost(10 ** generator.uniform(-4, -2) + 1e-3 * np.arange(60))
    found = choose_depths(candidates, cost)
    taken = [c.acceptance**d for c, d in zip(candidates, found.depths, strict=True) if d]
    assert found.least_worth == pytest.approx(min(taken, default=1.0))


def test_a_price_knows_the_calls_that_no_fit_has_read_yet() -> None:
    controller = knowing(CELL_KNOWN)
    cost = controller.knowledge.draft_time_of("small")
    for size in range(40):
        cost.observe((1.0, 1.0, float(size)), 1e-3 + 1e-5 * size)
    cost.solve()
    before = controller.burden(4, "small")
    for size in range(8):
        cost.observe((1.0, 1.0, float(size)), 3e-3 + 1e-5 * size)
    assert controller.burden(4, "small") > 1.1 * before


def test_a_token_bears_its_own_row_whoever_else_is_drafted_for() -> None:
    controller, generator = knowing(CELL_KNOWN), random.Random(3)
    for _ in range(400):
        passes, rows = generator.randint(1, 8), generator.randint(1, 64)
        seconds = 1e-6 + 2e-5 * passes + 1e-5 * rows
        controller.knowledge.draft_time_of("m").observe((1.0, passes, rows), seconds)
    for sequences, passes in ((1, 1), (8, 4), (64, 8)):
        expected = (1e-6 / passes + 2e-5) / sequences + 1e-5
        assert controller.token_sec("m", sequences, passes) == pytest.approx(expected, rel=0.05)


# --- controls -----------------------------------------------------------------------------------
@pytest.mark.parametrize("settling", [0, 1, 5])
@pytest.mark.parametrize("gain", [1.0, 1.1, 1.3, 1.6, 3.0])
def test_controls_lose_their_share_of_the_time_and_are_neither_rare_nor_most(
    gain: float, settling: int
) -> None:
    """A control and the steps that settle before it go at depth 0: each loses gain - 1."""
    every = DepthSchedule((2,), 16, weighed=True, gain=gain).control_every(1 + settling)
    least, most = CONTROL_EVERY_STEPS
    wanted = (gain - 1.0) * (1 + settling) / CONTROL_SHARE
    assert every == pytest.approx(min(max(wanted, least), most), abs=1.0)


def test_while_nothing_was_weighed_controls_are_rare() -> None:
    assert DepthSchedule((3,), 1).control_every(1) == CONTROL_EVERY_STEPS[1]


@pytest.mark.parametrize("step_sec", [1e-5, 3e-4, 5e-4, 7e-4, 1e-3, 1.9e-3, 2.1e-3, 0.1])
def test_settling_takes_as_many_steps_as_caches_need(step_sec: float) -> None:
    controller = Controller()
    for _ in range(10):
        controller.knowledge.step_time.observe(4, 4, step_sec)
    assert controller.plain_sec(4) == pytest.approx(step_sec)
    steps = controller.settling_steps(4)
    assert 1 <= steps <= MOST_SETTLING_STEPS
    assert steps * step_sec >= 0.999 * SETTLING_SEC or steps == MOST_SETTLING_STEPS
    assert (steps - 1) * step_sec <= 1.001 * SETTLING_SEC
