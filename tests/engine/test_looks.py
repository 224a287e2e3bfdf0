"""What a look at all sequences decides, what holds until the next, and what brings it early."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
from engine.simulating import Clock, ModelSource, Source, clock, depths_of, route, simulation
from policy.machines import linear

from specbatch.pipeline.engine import speculator
from specbatch.pipeline.policy.controller import CONTROL_EVERY_STEPS

__all__ = ["clock"]


def test_a_better_free_source_takes_the_place_of_what_was_chosen(clock: Clock) -> None:
    """It has a draft now and then, in a step that no look falls on."""
    rare, model = Source("rare", 0.95), ModelSource("model", 0.6, clock, prices=(1e-5, 1e-5, 1e-7))
    made = simulation(clock, rare, model, warm=1000)
    rare.limit = lambda _: 0
    made.run(300)
    assert model.drafted > 0
    course = made.speculator._course
    assert [proposer.name for proposer in course.watched] == ["rare"]
    for source in (rare, model):
        source.take_asked()
    lucky = made.sequences[3]
    rare.limit = lambda s: 16 if s is lucky else 0
    while made.speculator.steps + 1 >= made.speculator._course.until:
        made.step()
    rare.take_asked()
    looks = made.speculator._looks
    made.step()
    assert made.speculator._looks == looks
    if not made.speculator.in_control_step:
        assert set(depths_of(rare)) == {lucky}
        assert made.makers[3] is rare
        assert model in made.makers


def test_a_worse_free_source_is_not_watched(clock: Clock) -> None:
    poor, model = Source("poor", 0.3), ModelSource("model", 0.8, clock, prices=(1e-5, 1e-5, 1e-7))
    made = simulation(clock, poor, model, warm=1500)
    made.run(200)
    assert model.drafted > 0
    assert poor not in made.speculator._course.watched


def test_control_steps_measure_depth_0(clock: Clock) -> None:
    source = Source("a", 0.9)
    made = simulation(clock, source)
    speculator = made.speculator
    plain = 0
    every = CONTROL_EVERY_STEPS[1]  # there is much to lose
    for _ in range(3 * every):
        made.step()
        if speculator.steps % every == 0 and not speculator._opens:
            assert made.drafted == 0
            plain += 1
        else:
            assert made.drafted > 0
    assert plain == 3
    assert speculator.knowledge.step_time.plain(8) == pytest.approx(linear(8, 8), rel=0.01)


def test_depth_0_is_measured_early_where_it_is_not_known(clock: Clock) -> None:
    """Engines begin with a few steps of it, for the number of sequences that they begin with."""
    source = Source("a", 0.9)
    made = simulation(clock, source)
    assert made.speculator.knowledge.step_time.plain(40) is None
    made.add(32, route=route("night"))
    made.run(100)
    assert made.speculator.knowledge.step_time.plain(40) == pytest.approx(linear(40, 40), rel=0.01)


def test_a_course_ends_early_when_acceptance_is_far_below_what_was_expected(clock: Clock) -> None:
    rate = 0.9
    source = Source("a", lambda _: rate)
    made = simulation(clock, source, count=16)
    made.speculator._controller.look_sec = 1.0  # looks are dear: a choice stands for long
    while made.speculator.steps + 100 >= made.speculator._course.until:
        made.step()
    until, looks = made.speculator._course.until, made.speculator._looks
    made.run(20)
    assert made.speculator._looks == looks, "nothing has changed"
    rate = 0.0
    made.run(5)
    assert made.speculator._looks > looks
    assert made.speculator.steps < until


@pytest.mark.parametrize(("change", "looked"), [(-2, False), (1, False), (-3, True), (3, True)])
def test_a_course_ends_when_another_number_of_sequences_takes_part(
    clock: Clock, change: int, looked: bool
) -> None:
    made = simulation(clock, Source("a", 0.9))
    while made.speculator.steps + 8 >= made.speculator._course.until:
        made.step()
    looks = made.speculator._looks
    if change > 0:
        made.add(change, route=route("night"))
    else:
        del made.sequences[change:]
    made.step()
    assert (made.speculator._looks > looks) is looked


def test_only_a_look_at_all_sequences_judges(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in eight cannot pay for the call of a draft model that all would share."""
    judged: list[tuple[int, int]] = []

    def keep(_j: object, _c: object, _of: object, wants: Seq[object], _at: int, count: int) -> None:
        judged.append((len(wants), count))

    monkeypatch.setattr(speculator, "judge", keep)
    simulation(clock, Source("poor", 0.05), count=32)
    assert judged
    assert all(of == count for of, count in judged), judged
