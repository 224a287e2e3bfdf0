"""Who drafts for whom, with sources of known acceptance: measured, capped, replaced, taken out."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
from engine.simulating import (
    ENDLESS,
    WARM,
    Clock,
    ModelSource,
    Simulation,
    Source,
    clock,
    depths_of,
    route,
    simulation,
)
from policy.machines import linear, saturating

from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.policy import tuning
from specbatch.pipeline.policy.breaker import DecisionLog
from specbatch.pipeline.policy.tuning import MAX_DEPTH
from specbatch.schemas.records import Verification
from specbatch.schemas.speculation import AcceptanceCount

__all__ = ["clock"]


def share(source: Source, among: Seq[Source]) -> float:
    """Of the draft tokens asked for."""
    return source.drafted / max(sum(other.drafted for other in among), 1)


# --- the better source --------------------------------------------------------------------------


@pytest.mark.parametrize("order", [0, 1], ids=["better first", "better last"])
def test_of_two_sources_the_one_with_the_better_acceptance_is_asked(
    clock: Clock, order: int
) -> None:
    good, poor = Source("good", 0.8), Source("poor", 0.3)
    sources = [good, poor] if order == 0 else [poor, good]
    made = simulation(clock, *sources)
    made.run(300)
    assert good.drafted > 0
    assert share(good, sources) > 0.95


def test_another_is_asked_once_the_first_has_become_worse(clock: Clock) -> None:
    rates = {"a": 0.8, "b": 0.6}
    a, b = (Source(name, lambda _, name=name: rates[name]) for name in rates)
    made = simulation(clock, a, b)
    made.run(100)
    assert share(a, [a, b]) > 0.95
    rates["a"] = 0.1
    made.run(300)
    for source in (a, b):
        source.take_asked()
    made.run(200)
    assert share(b, [a, b]) > 0.9


def test_a_model_is_asked_only_where_its_price_leaves_it_the_better(clock: Clock) -> None:
    free = Source("free", 0.5)
    cheap = ModelSource("model", 0.8, clock, prices=(1e-5, 1e-5, 1e-7))
    made = simulation(clock, free, cheap, warm=1500)
    made.run(300)
    assert share(cheap, [free, cheap]) > 0.9
    # A token of this one is more likely right, and pays; but it costs a seventh of one of depth 0.
    free, dear = Source("free", 0.5), ModelSource("model", 0.58, clock, (1e-5, 1.6e-4, 1e-6))
    made = simulation(clock, free, dear, warm=1500)
    made.run(300)
    assert share(free, [free, dear]) > 0.9


def test_a_source_that_has_nothing_now_is_replaced_in_the_same_step(clock: Clock) -> None:
    first, second = Source("first", 0.9), Source("second", 0.6)
    made = simulation(clock, first, second)
    made.without_controls()
    while made.speculator.steps + 4 >= made.speculator._selection.until:
        made.step()
    replans = made.speculator._replans
    made.step()
    assert {draft.proposer for draft in made.plan.drafts if draft} == {"first"}
    first.limit = lambda _: 0
    first.take_asked()
    for _ in range(2):
        made.step()
        assert {draft.proposer for draft in made.plan.drafts if draft} == {"second"}
        assert made.drafted > 0
    assert made.speculator._replans == replans, "no replan was needed for it"
    assert first.drafted == 0


def test_drafts_are_never_deeper_than_what_there_is_or_there_is_room_for(clock: Clock) -> None:
    source = Source("a", 0.95, limit=3)
    made = simulation(clock, source)
    made.run(100)
    assert 0 < max(depths_of(source).values()) <= 3
    source.limit = lambda _: 16
    asked_for: list[int] = []

    def no_room(_: Sequence, wanted: int) -> int:
        asked_for.append(wanted)
        return 0

    source.take_asked()
    for _ in range(20):
        assert not any(made.speculator.propose(made.sequences, no_room).drafts)
    assert asked_for
    assert source.asked == []


@pytest.mark.parametrize("left", [1, 2, 3])
def test_a_choice_made_as_a_sequence_ends_is_no_shorter_for_the_next(
    clock: Clock, left: int
) -> None:
    source = Source("a", 0.95)
    made = simulation(clock, source, count=1)
    (ending,) = made.sequences
    ending.max_length = len(ending.tokens) + left
    made.speculator._selection.until = 0  # now it replans
    made.step()
    replans = made.speculator._replans
    made.speculator.forget(ending)
    made.sequences = [made.of(replace(ENDLESS, request_id="next", route=route("nightly")))]
    source.take_asked()
    made.run(5)
    assert made.speculator._replans == replans, "the choice still stands"
    assert max(depths_of(source).values()) >= 8


# --- what requests say --------------------------------------------------------------------------


def test_a_request_names_its_sources(clock: Clock) -> None:
    good, poor = Source("good", 0.8), Source("poor", 0.6)
    made = Simulation(linear, [good, poor], clock)
    bound = made.add(4, sources=frozenset({"poor"}), route=route("bound"))
    made.add(4, route=route("free"))
    closed = made.add(4, sources=frozenset[str](), route=route("closed"))
    made.run(WARM)
    assert set(depths_of(good)).isdisjoint([*bound, *closed])
    assert set(depths_of(poor)).isdisjoint(closed)
    poor.take_asked()
    made.run(100)
    assert set(depths_of(poor)) >= set(bound)


def test_a_named_source_is_the_only_one_that_steps_in(clock: Clock) -> None:
    first, second = Source("first", 0.9), Source("second", 0.9)
    made = simulation(clock, first, second, sources=frozenset({"first"}))
    made.run(20)
    assert first.drafted > 0
    first.limit = lambda _: 0
    made.run(200)
    assert second.drafted == 0


def test_a_cap_bounds_the_depth_and_0_means_none(clock: Clock) -> None:
    source = Source("a", 0.95)
    made = Simulation(linear, [source], clock)
    capped, none, free = (
        made.add(4, max_depth=cap, route=route("nightly")) for cap in (2, 0, None)
    )
    made.run(WARM)
    deepest = depths_of(source)
    assert max(deepest[s] for s in capped) == 2
    assert not set(none) & set(deepest)
    assert 2 < max(deepest[s] for s in free) <= MAX_DEPTH


@pytest.mark.parametrize(("cap", "deepest"), [(2, 2), (0, 0)])
def test_a_cap_holds_for_newcomers_too(clock: Clock, cap: int, deepest: int) -> None:
    source = Source("a", 0.95)
    made = simulation(clock, source, count=16)
    made.run(5)
    assert made.speculator._selection.newcomers[route("nightly")][1] > 2
    (newcomer,) = made.add(1, max_depth=cap, route=route("nightly"))
    (other,) = made.add(1, route=route("nightly"))
    source.take_asked()
    replans = made.speculator._replans
    while other not in depths_of(source):
        made.step()
    assert made.speculator._replans == replans, "it came between two replans"
    assert depths_of(source)[other] > 2
    assert depths_of(source).get(newcomer, 0) == deepest


def test_a_cap_holds_for_a_free_draft_that_turns_up(clock: Clock) -> None:
    rare, model = Source("rare", 0.98), ModelSource("model", 0.5, clock, prices=(1e-5, 1e-5, 1e-7))
    made = simulation(clock, rare, model, max_depth=3)
    rare.limit = lambda s: 16 if s.num_output % 5 == 0 else 0
    made.run(400)
    assert rare.drafted > 0
    assert max(depths_of(rare).values()) <= 3


@pytest.mark.parametrize("depth", [None, 4])
def test_a_cap_of_long_contexts_holds_once_an_output_is_so_long(
    clock: Clock, depth: int | None
) -> None:
    source = Source("a", 0.95)
    made = Simulation(linear, [source], clock)
    (growing,) = made.add(1, depth=depth, context_depths=((400, 1),), route=route("nightly"))
    made.run_until(lambda: len(growing.tokens) >= 100, 400)
    source.take_asked()
    made.run_until(lambda: len(growing.tokens) >= 300, 400)
    assert depths_of(source)[growing] > 1
    made.run_until(lambda: len(growing.tokens) >= 1200, 1200)  # one choice stands for some steps
    source.take_asked()
    made.run(50)
    assert depths_of(source)[growing] == 1


@pytest.mark.parametrize("fixed", [0, 1, 4])
def test_a_fixed_depth_is_kept_whatever_pays_and_however_it_is_judged(
    clock: Clock, fixed: int
) -> None:
    source = Source("a", 0.0)
    made = simulation(clock, source, depth=fixed, warm=50)
    for _ in range(50):
        made.step()
        assert [len(draft) for draft in made.plan.drafts] == [fixed] * 8
    assert made.speculator.decision_log.lessons("nightly").decisions == ()


def test_the_last_token_is_never_drafted_for(clock: Clock) -> None:
    source = Source("a", 0.95)
    made = simulation(clock, source, depth=4, warm=0)
    for sequence in made.sequences:
        sequence.max_length = len(sequence.tokens) + 3
    drafts = made.speculator.propose(made.sequences, lambda _, wanted: wanted).drafts
    assert [len(draft) for draft in drafts] == [2] * 8, "the third comes of the pass itself"


def test_ratio_tests_are_not_drafted_for_by_those_who_know_no_law(clock: Clock) -> None:
    lawless, probabilistic = Source("lawless", 0.9), Source("probabilistic", 0.6)
    probabilistic.has_draft_probs = True
    sampled = replace(ENDLESS.params, temperature=1.0)
    made = Simulation(linear, [lawless, probabilistic], clock)
    ratio = made.add(4, verification=Verification.REJECTION, params=sampled)
    coupled = made.add(4, params=sampled)
    greedy = made.add(4, verification=Verification.REJECTION)
    made.run(WARM)
    assert set(depths_of(lawless)) == {*coupled, *greedy}
    assert set(ratio) <= set(depths_of(probabilistic))


# --- jobs and tags ------------------------------------------------------------------------------


def test_a_tags_own_estimate_wins_over_its_jobs(clock: Clock) -> None:
    """On one half of a job's rows one source is right, on the other half another."""
    best_of = {"x": "a", "y": "b"}
    a, b = (
        Source(name, lambda s, n=name: 0.85 if best_of[str(s.request.route.tag)] == n else 0.2)
        for name in "ab"
    )
    made = Simulation(linear, [a, b], clock, replaced_after=60)
    for tag in best_of:
        made.add(4, route=route("nightly", tag))
    made.run(2000)
    for source in (a, b):
        source.take_asked()
    made.run(400)
    by_tag = {"x": {"a": 0, "b": 0}, "y": {"a": 0, "b": 0}}
    for source in (a, b):
        for call in source.asked:
            for sequence, depth in call:
                by_tag[str(sequence.request.route.tag)][source.name] += depth
    assert by_tag["x"]["a"] > 4 * by_tag["x"]["b"]
    assert by_tag["y"]["b"] > 4 * by_tag["y"]["a"]


def test_a_sequences_own_acceptance_tells_it_from_its_like(clock: Clock) -> None:
    hopeless: set[Sequence] = set()
    source = Source("a", lambda s: 0.02 if s in hopeless else 0.9)
    made = Simulation(linear, [source], clock)
    hopeless.update(made.add(4, route=route("nightly")))
    good = made.add(12, route=route("nightly"))
    made.run(WARM)
    source.take_asked()
    made.run(400)
    deep = dict.fromkeys(made.sequences, 0)
    for call in source.asked:
        for sequence, depth in call:
            deep[sequence] += depth
    assert max(deep[s] for s in hopeless) < 0.2 * min(deep[s] for s in good)


def test_a_source_taken_out_on_one_job_is_asked_on_another(clock: Clock) -> None:
    source = Source("a", lambda s: 0.85 if s.request.route.job == "good" else 0.02)
    made = Simulation(linear, [source], clock, replaced_after=100)
    for job in ("good", "bad"):
        made.add(8, route=route(job))
    decision_log = made.speculator.decision_log
    made.run_until(lambda: not decision_log.allows("bad", "a", made.speculator.steps), 3000)
    source.take_asked()
    made.run(100)
    assert {s.request.route.job for s in depths_of(source)} == {"good"}
    assert decision_log.allows("good", "a", made.speculator.steps)
    assert not decision_log.allows("bad", "a", made.speculator.steps)


def test_what_earlier_nights_found_chooses_from_the_first_look_on(clock: Clock) -> None:
    a, b = Source("a", 0.5), Source("b", 0.5)
    known = simulation(clock, a, b, depth=1).speculator.knowledge
    made = Simulation(linear, [a, b], clock)
    made.speculator.knowledge.step_time = known.step_time
    made.speculator.decision_log = DecisionLog({})
    made.speculator.decision_log.prime(
        "nightly",
        [AcceptanceCount("a", None, 20.0, 200.0), AcceptanceCount("b", None, 180.0, 200.0)],
    )
    made.add(8, route=route("nightly"))
    made.run(2)
    assert (a.drafted, b.drafted > 0) == (0, True)


# --- books --------------------------------------------------------------------------------------


def test_makers_hear_of_verdicts_and_ends_and_nothing_is_kept_of_the_finished(
    clock: Clock,
) -> None:
    a, b = Source("a", 0.8), Source("b", 0.7)
    made = simulation(clock, a, b, warm=0)
    first = list(made.sequences)
    made.run(WARM)
    drafted = sum(len(call) for source in (a, b) for call in source.asked)
    assert len(a.verified) + len(b.verified) == drafted > 0
    for sequence in first:
        made.speculator.forget(sequence)
    for source in (a, b):
        assert source.forgotten == first
    assert not made.speculator._own
    assert not made.speculator._tracks
    assert not made.speculator._selection.choices


def test_all_that_was_tested_is_handed_out_as_counts(clock: Clock) -> None:
    source = Source("a", 0.7)
    made = Simulation(linear, [source], clock)
    made.speculator.decision_log.prime("nightly", [])
    for tag in ("x", "y"):
        made.add(4, route=route("nightly", tag))
    made.run(WARM)
    counts = made.speculator.decision_log.lessons("nightly").counts
    agreed = sum(s.accepted for s in made.sequences)
    assert sum(count.agreed for count in counts) == agreed > 0
    assert {(count.proposer, count.tag) for count in counts} == {("a", "x"), ("a", "y")}
    assert all(0.6 < count.agreed / count.tested < 0.8 for count in counts)


def test_without_sources_every_depth_is_0_and_nothing_is_looked_at(clock: Clock) -> None:
    made = simulation(clock, warm=20)
    assert not any(made.plan.drafts)
    assert made.speculator.steps == 0


@pytest.mark.parametrize("depth", [None, 4], ids=["auto", "fixed"])
def test_steps_never_hold_more_draft_tokens_than_are_allowed(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, depth: int | None
) -> None:
    """However cheap they are, and whoever asks for them: passes are made ready for so many."""
    rare, often = Source("rare", 0.995), Source("often", 0.95)
    made = Simulation(saturating, [rare, often], clock)
    monkeypatch.setattr(tuning, "MAX_DRAFT_TOKENS", 20)
    made.add(8, route=route("nightly"), depth=depth)
    rare.limit = lambda s: 16 * (len(s.request.request_id) % 2)
    deepest = 0
    for step in range(WARM):
        if step % 50 == 0:
            made.add(1, route=route("nightly"), depth=depth)
        made.step()
        deepest = max(deepest, made.drafted)
    assert deepest == 20


def test_a_choice_made_for_long_outputs_is_cut_where_one_ends(clock: Clock) -> None:
    source = Source("a", 0.95)
    made = simulation(clock, source)
    made.without_controls()
    while made.speculator.steps + 3 >= made.speculator._selection.until:
        made.step()
    ending = made.sequences[3]
    ending.max_length = len(ending.tokens) + 3
    drafts = made.speculator.propose(made.sequences, lambda _, wanted: wanted).drafts
    assert len(drafts[3]) == 2
    assert min(len(draft) for draft in drafts[:3]) > 2


def test_a_fixed_depth_goes_on_with_a_source_that_was_taken_out_of_the_job(clock: Clock) -> None:
    source = Source("a", 0.02)
    made = Simulation(linear, [source], clock)
    made.add(8, route=route("nightly"))
    (fixed,) = made.add(1, route=route("nightly"), depth=2)
    decision_log = made.speculator.decision_log
    made.run_until(lambda: not decision_log.allows("nightly", "a", made.speculator.steps), 3000)
    source.take_asked()
    made.run(20)
    assert not decision_log.allows("nightly", "a", made.speculator.steps)
    # Beside it samples in shadow of the others, one at a time.
    assert [call for call in source.asked if call[0][0] is fixed] == [[(fixed, 2)]] * 20
