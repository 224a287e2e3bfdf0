"""The whole decision, learned on simulated machines, beside the best there is."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from policy.machines import MOST, Machine, best, linear, saturating, stepped

from specbatch.pipeline.policy import tuning
from specbatch.pipeline.policy.depth import Candidate, Controller, DepthSchedule
from specbatch.pipeline.policy.tuning import (
    HOLD_STEPS,
    HYSTERESIS,
    LONGEST_HOLD_STEPS,
    REPLAN_SHARE,
    TRIED_SHARE,
    TRY_EVERY_STEPS,
)


def depths_at(course: DepthSchedule, step: int) -> tuple[int, ...]:
    """Those of a step of it, which count from 0."""
    if course.opening is not None and step < course.opening_steps:
        return course.opening
    return course.depths


def tokens_per_sec(machine: Machine, rates: list[float], depths: list[int]) -> float:
    tokens = sum(sum(rate**j for j in range(d + 1)) for rate, d in zip(rates, depths, strict=True))
    return tokens / machine(len(rates) + sum(depths), len(rates))


COUNTS = (1, 8, 32, 128)
RATES = (0.0, 0.3, 0.5, 0.7, 0.9, None)  # None: sequences of different acceptance


@pytest.mark.pipeline  # half a million simulated steps
@pytest.mark.parametrize(
    ("machine", "noise"),
    [
        pytest.param(linear, 0.0, id="linear-still"),
        pytest.param(stepped, 0.1, id="stepped-noisy"),
        pytest.param(saturating, 0.1, id="saturating-noisy"),
        pytest.param(linear, 0.1, id="linear-noisy", marks=pytest.mark.long),
        pytest.param(stepped, 0.0, id="stepped-still", marks=pytest.mark.long),
        pytest.param(saturating, 0.0, id="saturating-still", marks=pytest.mark.long),
    ],
)
def test_what_is_learned_comes_near_the_best_there_is(machine: Machine, noise: float) -> None:
    """Within 2 % of trying everything, with all that trials cost after the first 2,000 steps."""
    shares = [reached(machine, noise, count, rate) for count in COUNTS for rate in RATES]
    assert min(shares) >= 0.98, sorted(shares)[:5]


def reached(
    machine: Machine,
    noise: float,
    count: int,
    rate: float | None,
    slow: Callable[[int, int], float] = lambda _step, _size: 1.0,
    steps: tuple[int, int] = (2000, 5000),
) -> float:
    """Tokens per second in these steps, after learning in those before, as a share of the best.

    `slow(step, size)`: what a pass of so many tokens takes longer then.
    """
    generator = random.Random(f"{count} {rate} {noise}")
    rates = [generator.choice([0.2, 0.6, 0.9]) if rate is None else rate for _ in range(count)]
    controller = Controller()
    controller.knowledge.acceptance_of("drafts").tested = 1000.0
    candidates = [Candidate(MOST, r) for r in rates]
    tokens = seconds = 0.0
    until = 0
    for step in range(steps[1]):
        if step >= until:
            course = controller.replan(candidates)
            begun, until = step, step + course.steps
        is_control = not step % course.control_every(1)
        depths = [0] * count if is_control else list(depths_at(course, step - begun))
        size = count + sum(depths)
        took = machine(size, count)
        brought = took * tokens_per_sec(machine, rates, depths)
        observed = took * generator.lognormvariate(0.0, noise) * slow(step, size)
        controller.knowledge.step_time.observe(size, count, observed)
        if step >= steps[0]:
            tokens, seconds = tokens + brought, seconds + took
    return tokens / seconds / best(machine, rates)


@pytest.mark.parametrize("rate", [0.7, 0.9])
def test_a_size_that_was_met_in_a_bad_hour_is_not_shunned_for_ever(rate: float) -> None:
    """While it is learned, somebody else takes the machine whenever passes have the best size."""

    def unlucky(step: int, size: int) -> float:
        return 1.3 if step < 1500 and 32 < size <= 48 else 1.0

    assert reached(stepped, 0.05, 8, rate, unlucky, (12_000, 15_000)) >= 0.98


def test_trials_cost_no_more_than_what_was_put_aside() -> None:
    """A machine on which drafting never pays: what is lost to trying stays small from the start."""
    controller, count = Controller(), 64
    controller.knowledge.acceptance_of("drafts").tested = 1000.0
    candidates = [Candidate(MOST, 0.3)] * count
    for depth in (0, 0, 1, 1, 1):
        tokens = count * (1 + depth)
        controller.knowledge.step_time.observe(tokens, count, 1e-3 * tokens)
    seconds = done = 0.0
    step = 0
    while step < 300:
        course = controller.replan(candidates)
        for k in range(course.steps):
            depths = depths_at(course, k)
            took = 1e-3 * (count + sum(depths))
            controller.knowledge.step_time.observe(count + sum(depths), count, took)
            seconds, step = seconds + took, step + 1
            done += count + sum(0.3 * (depth > 0) for depth in depths)
    assert done / seconds >= 0.97 * count / (1e-3 * count)


# --- what a replan costs ------------------------------------------------------------------------


def taught(machine: Machine, count: int, most: int = MOST) -> Controller:
    """A controller that knows the machine at `count` sequences, and drafts in general."""
    controller = Controller()
    controller.knowledge.acceptance_of("drafts").tested = 1000.0
    for tokens in [*range(count, count * (1 + most) + 1)] * 60:
        controller.knowledge.step_time.observe(tokens, count, machine(tokens, count))
    return controller


def test_a_replans_price_is_an_average_that_one_long_one_hardly_moves() -> None:
    controller = Controller()
    controller.replanned(1e-4)
    assert controller.replan_sec == pytest.approx(1e-4)
    controller.replanned(10.0)  # the system slept in it
    assert controller.replan_sec == pytest.approx(1.6e-4), "counted as four times the average"
    for _ in range(60):
        controller.replanned(5e-4)
    assert controller.replan_sec == pytest.approx(5e-4, rel=0.01)


@pytest.mark.parametrize("acceptance", [0.0, 0.9], ids=["resting", "drafting"])
@pytest.mark.parametrize("replan_sec", [0.0, 1e-5, 1e-4, 3e-4, 1e-3, 1.0])
def test_replanning_takes_no_more_than_its_share_of_the_time(
    replan_sec: float, acceptance: float
) -> None:
    controller, count = taught(linear, 4), 4
    if replan_sec:
        controller.replanned(replan_sec)
    course = controller.replan([Candidate(MOST, acceptance)] * count)
    assert course.weighed
    assert course.at_depth_0 is (acceptance == 0.0)
    step_sec = linear(count + sum(course.depths), count)
    needed = replan_sec / (REPLAN_SHARE * step_sec)  # steps beside which a replan is a small share
    wanted = min(max(needed, HOLD_STEPS), LONGEST_HOLD_STEPS)
    assert course.steps == pytest.approx(wanted, rel=0.05)


# --- rest and trials ----------------------------------------------------------------------------


def test_while_nothing_pays_a_few_are_tried_by_one_token_now_and_then_and_all_in_turn() -> None:
    count = 32
    controller = taught(linear, count)
    tried, steps, trials = set[int](), 0, 0
    while len(tried) < count:
        course = controller.replan([Candidate(MOST, 0.01)] * count)
        steps += course.steps
        assert steps < 40 * TRY_EVERY_STEPS, "some have no turn"
        assert course.at_depth_0
        if course.opening is None:
            continue
        trials += 1
        assert course.opening_steps == 1
        assert course.steps >= HOLD_STEPS, "no replan is spent on its result"
        assert set(course.opening) == {0, 1}
        chosen = {i for i, depth in enumerate(course.opening) if depth}
        assert len(chosen) == count // TRIED_SHARE
        assert not chosen & tried
        tried |= chosen
    assert trials == TRIED_SHARE
    assert steps / trials == pytest.approx(TRY_EVERY_STEPS, rel=0.3)


def test_one_sequence_alone_is_tried_too() -> None:
    controller = taught(saturating, 1)
    openings = [controller.replan([Candidate(MOST, 0.0)]).opening for _ in range(20)]
    assert (1,) in openings


@pytest.mark.parametrize("replan_sec", [1e-6, 1e-3], ids=["short", "long"])
def test_those_left_out_while_others_are_drafted_for_are_tried_now_and_then(
    replan_sec: float,
) -> None:
    """However long a choice stands, a trial is one step in many."""
    controller = taught(stepped, 32)
    controller.replanned(replan_sec)
    candidates = [Candidate(MOST, 0.3)] * 32  # sixteen tokens are free, more are not
    steps = trials = replans = 0
    tried = set[int]()
    while len(tried) < 32:
        course = controller.replan(candidates)
        assert steps < 600 * TRY_EVERY_STEPS, "some have no turn"
        steps, replans = steps + course.steps, replans + 1
        if course.opening is not None and course.opening_steps == 1:
            assert {i for i, depth in enumerate(course.depths) if depth} < {
                i for i, depth in enumerate(course.opening) if depth
            }
            tried |= {i for i, depth in enumerate(course.opening) if depth}
            trials += 1
    assert sum(course.depths) == 16
    assert trials <= steps / TRY_EVERY_STEPS
    assert replans <= steps / HOLD_STEPS


def test_what_pays_is_taken_up_at_once_after_a_rest() -> None:
    controller = taught(linear, 8)
    for _ in range(50):
        controller.replan([Candidate(MOST, 0.01)] * 8)
    course = controller.replan([Candidate(MOST, 0.9)] * 8)
    assert min(course.depths) > 1
    assert course.gain > 1.5


def test_drafting_hardly_worth_it_is_not_taken_up_but_kept() -> None:
    """Hysteresis: between the two the choice stays what it was."""
    count = 8
    needed = taught(linear, count).break_even(count, None)
    slightly = [Candidate(1, needed - 0.01)] * count  # what pays is what would be taken up
    fresh = taught(linear, count)
    assert all(fresh.replan(slightly).at_depth_0 for _ in range(2))
    drafting = taught(linear, count)
    assert not drafting.replan([Candidate(MOST, 0.9)] * count).at_depth_0
    course = drafting.replan(slightly)
    assert not course.at_depth_0
    assert 1.0 < course.gain < HYSTERESIS
    assert drafting.replan([Candidate(1, needed - 0.04)] * count).at_depth_0


def test_nobody_to_draft_for_stands_for_a_while() -> None:
    course = Controller().replan([], others=5)
    assert (course.depths, course.steps, course.at_depth_0) == ((), HOLD_STEPS, True)


# --- several draft models -----------------------------------------------------------------------

# Seconds: of a call, a pass, a token.
CHEAP, DEAR, BY_TOKEN = (1e-6, 1e-5, 1e-7), (1e-3, 4e-3, 1e-5), (1e-6, 2e-5, 1e-5)


def priced(controller: Controller, **models: tuple[float, float, float]) -> None:
    generator = random.Random(3)
    for name, prices in models.items():
        for _ in range(400):
            passes, rows = generator.randint(1, 8), generator.randint(1, 64)
            sizes = (1.0, float(passes), float(rows))
            seconds = sum(a * b for a, b in zip(sizes, prices, strict=True))
            controller.knowledge.draft_time_of(name).observe(sizes, seconds)


def test_a_token_costs_its_share_of_the_call_and_the_passes_of_all_who_are_drafted_for() -> None:
    controller = Controller()
    priced(controller, dear=DEAR)
    call, per_pass, row = DEAR
    for sequences, passes in ((1, 1), (8, 4)):
        found = controller.token_sec("dear", sequences, passes)
        assert found == pytest.approx((call / passes + per_pass) / sequences + row, rel=0.05)


def mixed(*groups: tuple[str | None, float, int]) -> list[Candidate]:
    return [Candidate(8, rate, name) for name, rate, count in groups for _ in range(count)]


@pytest.mark.parametrize("dear_ones", [2, 6], ids=["dear last", "dear first"])
def test_each_model_is_asked_where_its_own_price_pays(dear_ones: int) -> None:
    controller = taught(linear, 8)
    priced(controller, cheap=CHEAP, dear=DEAR)
    candidates = mixed(("dear", 0.8, dear_ones), ("cheap", 0.8, 8 - dear_ones))
    depths = controller.replan(candidates).depths
    assert set(depths[:dear_ones]) == {0}
    assert min(depths[dear_ones:]) > 0


def test_two_models_and_free_drafts_are_weighed_in_one_look() -> None:
    controller = taught(linear, 9)
    priced(controller, one=BY_TOKEN, two=CHEAP)
    course = controller.replan(mixed(("one", 0.8, 3), ("two", 0.8, 3), (None, 0.8, 3)))
    assert min(course.depths) > 0
    ones, twos = course.depths[:3], course.depths[3:6]
    # What is promised is what the step brings: the objective, from its definition.
    tokens = 9 + sum(0.8**j for depth in course.depths for j in range(1, depth + 1))
    seconds = linear(9 + sum(course.depths), 9)
    for own, (call, per_pass, row) in ((ones, BY_TOKEN), (twos, CHEAP)):
        seconds += call + max(own) * per_pass + sum(own) * row
    gain = tokens / seconds / (9 / linear(9, 9))
    assert course.gain == pytest.approx(gain, rel=0.03)


def test_models_together_draft_no_more_than_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    for most in (0, 1, 5, 11, 40):
        controller = taught(linear, 9)
        priced(controller, one=CHEAP, two=CHEAP)
        monkeypatch.setattr(tuning, "MAX_DRAFT_TOKENS", most)
        course = controller.replan(mixed(("one", 0.95, 4), ("two", 0.95, 3), (None, 0.95, 2)))
        assert sum(course.depths) <= most
        assert course.at_depth_0 is (most == 0)


def test_a_burden_is_a_tokens_price_in_tokens_of_depth_0() -> None:
    controller = taught(linear, 8)
    priced(controller, cheap=CHEAP, dear=DEAR, by_token=BY_TOKEN)
    prices = {"cheap": CHEAP, "dear": DEAR, "by_token": BY_TOKEN}
    for name, (_, per_pass, row) in prices.items():
        expected = (per_pass + 8 * row) / linear(8, 8)
        assert controller.burden(8, name) == pytest.approx(expected, rel=0.1)


def test_break_even_knows_the_machine_the_crowd_and_the_model() -> None:
    controller = taught(linear, 8)
    priced(controller, cheap=CHEAP, dear=DEAR)
    # One token more for each: 2.5e-5 s beside the 1.12e-3 s of eight, and what is asked on top.
    needed = HYSTERESIS * linear(16, 8) / linear(8, 8) - 1.0
    assert controller.break_even(8, None) == pytest.approx(needed, rel=0.05)
    free, cheap, dear = (controller.break_even(8, name) for name in (None, "cheap", "dear"))
    assert free < cheap < 0.3
    assert dear > 1.0


def test_a_replan_of_a_few_spends_nothing_on_trials() -> None:
    controller, candidates = Controller(), [Candidate(MOST, 0.9)] * 4
    controller.knowledge.acceptance_of("drafts").tested = 1000.0
    for depth in (0, 0, 1, 1, 1):
        tokens = 4 * (1 + depth)
        controller.knowledge.step_time.observe(tokens, 4, linear(tokens, 4))
    courses = [controller.replan(candidates, explores=False) for _ in range(12)]
    assert not any(course.opening for course in courses)
    assert any(controller.replan(candidates).opening for _ in range(3)), "it was put aside"


def test_a_new_engine_tries_its_first_depths_in_turn() -> None:
    controller, candidates = Controller(), [Candidate(8, 0.7)] * 2
    found = [controller.replan(candidates).depths for _ in range(2 * len(tuning.FIRST_DEPTHS))]
    turn = [tuning.FIRST_DEPTHS[n % len(tuning.FIRST_DEPTHS)] for n in range(1, len(found) + 1)]
    assert found == [(depth, depth) for depth in turn]


def test_a_price_is_what_calls_and_tokens_take_beside_depth_0() -> None:
    controller = taught(linear, 8)
    priced(controller, draft=(1e-3, 2e-4, 1e-5))
    curve = controller.knowledge.step_time.curve(8, 8, 16)
    plain, verifying = curve[0], curve[-1] - curve[0]
    free = controller.price(8, None)
    assert (free.call, free.token, free.row) == pytest.approx((0.0, verifying / plain, 0.0))
    of = controller.price(8, "draft")
    token = 2e-4 + 8 * 1e-5 + verifying
    expected = (1e-3 / plain, token / plain, 1e-5 / plain)
    assert (of.call, of.token, of.row) == pytest.approx(expected, rel=0.05)
