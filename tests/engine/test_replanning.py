"""What a replan decides, what holds until the next, and what brings it early."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
from engine.simulating import Clock, ModelSource, Source, clock, depths_of, route, simulation
from policy.machines import linear

from specbatch.pipeline.engines.speculation import speculator
from specbatch.pipeline.policy.costs.controls import Arm
from specbatch.pipeline.policy.tuning import CONTROL_EVERY_STEPS

__all__ = ["clock"]


def test_a_better_free_source_takes_the_place_of_what_was_chosen(clock: Clock) -> None:
    """It has a draft now and then, in a step that does not replan."""
    rare, model = Source("rare", 0.95), ModelSource("model", 0.6, clock, prices=(1e-5, 1e-5, 1e-7))
    made = simulation(clock, rare, model, warm=1000)
    rare.limit = lambda _: 0
    made.run(300)
    assert model.drafted > 0
    course = made.speculator._selection
    assert [proposer.name for proposer in course.watched] == ["rare"]
    for source in (rare, model):
        source.take_asked()
    lucky = made.sequences[3]
    rare.limit = lambda s: 16 if s is lucky else 0
    while made.speculator.steps + 1 >= made.speculator._selection.until:
        made.step()
    rare.take_asked()
    replans = made.speculator._replans
    made.without_controls()
    made.step()
    assert made.speculator._replans == replans
    assert set(depths_of(rare)) == {lucky}
    proposers = [draft.proposer for draft in made.plan.drafts]
    assert proposers[3] == rare.name
    assert model.name in proposers


def test_a_worse_free_source_is_not_watched(clock: Clock) -> None:
    poor, model = Source("poor", 0.3), ModelSource("model", 0.8, clock, prices=(1e-5, 1e-5, 1e-7))
    made = simulation(clock, poor, model, warm=1500)
    made.run(200)
    assert model.drafted > 0
    assert poor not in made.speculator._selection.watched


def test_control_steps_come_by_chance_and_draft_nothing(clock: Clock) -> None:
    """As many as the course says, never in a step that looked, and every other step drafts but
    those that settle before a control."""
    made = simulation(clock, Source("a", 0.9))
    speculator = made.speculator
    begun, controls, expected, variance, settling = 0, 0, 0.0, 0.0, 0
    for _ in range(3000):
        replans = speculator._replans
        made.step()
        assert (made.plan.arm in (Arm.SETTLING, Arm.CONTROL)) == (made.drafted == 0)
        if settling:
            settling -= 1
            assert made.plan.arm is (Arm.SETTLING if settling else Arm.CONTROL)
            controls += not settling
            continue
        if speculator._replans > replans:
            assert made.plan.arm is Arm.DRAFTS
            continue
        chance = 1.0 / (made.plan.odds + 1.0)
        expected, variance = expected + chance, variance + chance * (1.0 - chance)
        if made.plan.arm is Arm.SETTLING:
            begun += 1
            settling = speculator._controller.settling_steps(len(made.sequences))
    assert abs(begun - expected) < 3.0 * variance**0.5
    assert controls == begun - bool(settling)
    assert made.plan.odds + 1.0 == CONTROL_EVERY_STEPS[1], "there is much to lose"
    assert speculator.knowledge.step_time.plain(8) == pytest.approx(linear(8, 8), rel=0.01)


def test_a_step_with_a_fixed_depth_is_no_part_of_the_experiment(clock: Clock) -> None:
    made = simulation(clock, Source("a", 0.9))
    made.add(1, route=route("nightly"), depth=2)
    for _ in range(200):
        made.step()
        assert made.plan.arm is Arm.APART
    made.sequences.pop()
    made.run(200)
    assert made.plan.arm is not Arm.APART


def test_a_job_at_depth_0_rests(clock: Clock) -> None:
    made = simulation(clock, Source("a", 0.9), depth=0)
    for _ in range(100):
        made.step()
        assert made.plan.arm is Arm.PLAIN


def test_a_control_that_did_not_come_about_says_nothing_of_their_length(clock: Clock) -> None:
    """Long ones are rarer, also after a replan came between settling and one of them."""
    made = simulation(clock, Source("a", 0.3))
    new = made.add(3, route=route("nightly"))
    made.run(900)
    made.coin = lambda: 0.0
    made.run_until(lambda: made.plan.arm is Arm.CONTROL, 1000)
    made.speculator.on_passes(Arm.CONTROL, 8)
    made.run_until(lambda: made.plan.arm is Arm.SETTLING, 1000)
    made.step()
    assert made.plan.arm is Arm.SETTLING, "two steps settle"
    del made.sequences[-len(new) :]
    made.step()
    assert made.plan.arm is Arm.DRAFTS, "another number of sequences: it replans"
    made.step()
    assert made.plan.odds + 1.0 == CONTROL_EVERY_STEPS[1]


@pytest.mark.parametrize(("depth", "counted"), [(None, 8), (0, 0)])
def test_passes_of_one_call_count_as_the_step_does(
    clock: Clock, depth: int | None, counted: int
) -> None:
    """Steps in which nobody asks for drafts do not count."""
    made = simulation(clock, Source("poor", 0.05), depth=depth)
    steps = made.speculator.steps
    made.step()
    made.speculator.on_passes(made.plan.arm, 8)
    assert made.speculator.steps == steps + counted


def test_depth_0_is_measured_early_where_it_is_not_known(clock: Clock) -> None:
    """Engines begin with a few steps of it, for the number of sequences that they begin with."""
    source = Source("a", 0.9)
    made = simulation(clock, source)
    assert made.speculator.knowledge.step_time.plain(40) is None
    made.add(32, route=route("nightly"))
    made.run(100)
    assert made.speculator.knowledge.step_time.plain(40) == pytest.approx(linear(40, 40), rel=0.01)


def test_a_course_ends_early_when_acceptance_is_far_below_what_was_expected(clock: Clock) -> None:
    rate = 0.9
    source = Source("a", lambda _: rate)
    made = simulation(clock, source, count=16)
    made.speculator._controller.replan_sec = 1.0  # replans are dear: a choice stands for long
    while made.speculator.steps + 100 >= made.speculator._selection.until:
        made.step()
    until, replans = made.speculator._selection.until, made.speculator._replans
    made.run(20)
    assert made.speculator._replans == replans, "nothing has changed"
    rate = 0.0
    made.run(5)
    assert made.speculator._replans > replans
    assert made.speculator.steps < until


@pytest.mark.parametrize(("change", "replanned"), [(-2, False), (1, False), (-3, True), (3, True)])
def test_a_course_ends_when_another_number_of_sequences_takes_part(
    clock: Clock, change: int, replanned: bool
) -> None:
    made = simulation(clock, Source("a", 0.9))
    while made.speculator.steps + 8 >= made.speculator._selection.until:
        made.step()
    replans = made.speculator._replans
    if change > 0:
        made.add(change, route=route("nightly"))
    else:
        del made.sequences[change:]
    made.step()
    assert (made.speculator._replans > replans) is replanned


def test_only_a_replan_of_all_sequences_is_recorded(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in eight cannot pay for the call of a draft model that all would share."""
    judged: list[tuple[int, int]] = []

    def keep(
        _j: object, _c: object, _of: object, picked: Seq[object], _at: int, count: int
    ) -> None:
        judged.append((len(picked), count))

    monkeypatch.setattr(speculator, "record_decisions", keep)
    simulation(clock, Source("poor", 0.05), count=32)
    assert judged
    assert all(of == count for of, count in judged), judged
