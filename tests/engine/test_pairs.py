"""A candidate draft model beside the serving one: a fair comparison that changes no output."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from engine.decoding import Bench, assert_same, baseline_of, bench, prompts, runner_of
from engine.replaying import decide, sequence_of
from engine.simulating import Clock, ModelSource, Source, clock
from engine.test_switches import off

from specbatch.kernels.decoder.contract import BLOCK_SIZE
from specbatch.pipeline.engines.contract import Cohort, Request
from specbatch.pipeline.engines.exact.draft_model import DraftModelProposer
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.speculation import pairs
from specbatch.pipeline.engines.speculation.pairs import AT_ONCE, SAVED, SHARE, Pair, Pairs
from specbatch.pipeline.engines.speculation.shadow import DEPTH, is_watched
from specbatch.pipeline.engines.speculation.speculator import Speculator
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.policy.acceptance import Track, Tracks
from specbatch.schemas.draft_switches import RowScope, SwitchScope
from specbatch.schemas.records import SamplingParams, Verification
from specbatch.schemas.speculation import NO_SHADOW_PAIR, ShadowPair
from support.engines import loaded
from support.models import TinyPair

__all__ = ["clock"]
A, B = "draft-model", "draft-model@b"
JOB = "nightly"
PARAMS = SamplingParams(max_tokens=24, temperature=0.7, ignore_eos=True)
FULL = BLOCK_SIZE  # tokens of a prompt that fills its first block
FLAT = replace(PARAMS, temperature=20.0)  # the noise they share decides, and they often agree


@pytest.fixture
def without_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models' steps are so short that a small share of them buys next to nothing."""
    monkeypatch.setattr(pairs, "SHARE", 1e6)


@dataclass(slots=True)
class WatchedPairs(Pairs):
    """Remembers what was kept: output tokens then, and the pair."""

    kept: list[tuple[int, Pair]] = field(default_factory=list)

    def keep(self, pair: Pair, track: Track) -> None:
        self.kept.append((pair.sequence.num_output, pair))
        Pairs.keep(self, pair, track)


def engine_of(tiny: TinyPair, num_blocks: int = 1024, other: bool = True) -> Bench:
    """The tiny draft model is `A`; `B` is the verifier itself, or the tiny draft model again."""
    made = bench(tiny.verifier, tiny.draft, num_blocks=num_blocks, draft_blocks=1024)
    second = runner_of(loaded(tiny.verifier if other else tiny.draft, "float32"), 1024)
    models = (DraftModelProposer(made.runners[1], name=A), DraftModelProposer(second, name=B))
    engine = Engine(made.runners[0], (made.blocks, *models))
    return Bench(engine, [*made.runners, second], made.blocks)


def requests(
    count: int = 3, params: SamplingParams = PARAMS, longest: int = 70, **values: object
) -> list[Request]:
    given = {"route": Cohort(JOB), "candidate": B, "draft_model": A, **values}
    return [
        Request(f"{i}", prompt, params, seed=i, **given)  # type: ignore[arg-type]  # by name
        for i, prompt in enumerate(prompts(count, min(longest, BLOCK_SIZE), longest))
    ]


def run(one: Bench, asked: list[Request]) -> WatchedPairs:
    watched = one.engine._speculator._pairs = WatchedPairs()
    one.engine.prime(JOB, ())
    one.add(*asked).run()
    return watched


def compared(one: Bench) -> ShadowPair:
    return sum((done.shadow_pair for done in one.finished.values()), NO_SHADOW_PAIR)


# --- the engine ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_budget")
@pytest.mark.parametrize("num_blocks", [1024, 12], ids=["ample", "preempted"])
@pytest.mark.parametrize("depth", [None, 3, 0])
def test_outputs_are_those_without_a_candidate(
    tiny_pair: TinyPair, num_blocks: int, depth: int | None
) -> None:
    asked = requests(6, depth=depth)
    one = engine_of(tiny_pair, num_blocks)
    run(one, asked)
    for request in asked:
        assert_same(one.finished[request.request_id], baseline_of(tiny_pair.verifier)(request))
    assert compared(one).drafts
    assert one.engine.stats.proposer_failures == 0
    assert (one.blocks.preempted > 0) is (num_blocks == 12)
    one.assert_all_blocks_are_free()


@pytest.mark.usefixtures("without_budget")
def test_drafts_that_are_verified_are_the_same_with_a_candidate(tiny_pair: TinyPair) -> None:
    asked = requests(5, FLAT, FULL, depth=3)
    one, other = engine_of(tiny_pair), engine_of(tiny_pair)
    assert run(one, asked).kept
    run(other, [replace(request, candidate=None) for request in asked])
    for request in asked:
        done, expected = (each.finished[request.request_id] for each in (one, other))
        assert done.provenance.sources == expected.provenance.sources == (A,)
        assert done.shadow_proposed == 0
        if is_watched(request.seed):  # its drafts end at the places where both models draft
            continue
        assert done.proposed_at_depth == expected.proposed_at_depth
        assert done.accepted_at_depth == expected.accepted_at_depth


def test_places_are_as_many_where_the_serving_model_does_badly() -> None:
    """Its drafts are refused in every other stretch of 64 tokens, and accepted in the others."""
    places, passes = [0, 0], [0, 0]
    for seed in range(400):
        if not is_watched(seed):
            continue
        sequence = sequence_of(Request("r", (1,), SamplingParams(max_tokens=9999), seed=seed))
        sequence.request = replace(sequence.request, candidate=B)
        mine = Pairs()
        while sequence.num_output < 1024:
            good = sequence.num_output // 64 % 2
            places[good] += mine.is_due(sequence)
            passes[good] += 1
            drafted = min(7, mine.room(sequence))
            sequence.tokens += [0] * (1 + good * drafted)
    assert passes[0] > 4 * passes[1]
    assert abs(places[0] - places[1]) < 0.05 * sum(places), places


@pytest.mark.usefixtures("without_budget")
@pytest.mark.parametrize("depth", [0, 3])
def test_what_is_compared_is_what_each_model_drafts_alone_from_the_same_prefix(
    tiny_pair: TinyPair, depth: int
) -> None:
    asked = requests(5, FLAT, FULL, depth=depth)
    one = engine_of(tiny_pair)
    kept = run(one, asked).kept
    fresh = {
        name: DraftModelProposer(runner_of(loaded(folder, "float32"), 1024, share_prefixes=False))
        for name, folder in ((A, tiny_pair.draft), (B, tiny_pair.verifier))
    }
    expected: dict[str, ShadowPair] = {}
    for at, pair in kept:
        request = pair.sequence.request
        output = one.finished[request.request_id].token_ids
        agreed = {}
        for name, proposer in fresh.items():
            sequence = sequence_of(request)
            sequence.tokens += output[:at]
            (draft,) = proposer.propose([sequence], [pair.depth])
            proposer.forget(sequence)
            assert pair.drafts[name] == draft
            same = [a == b for a, b in zip(draft, output[at:], strict=False)]
            agreed[name] = [*same, False].index(False)
        before = expected.get(request.request_id, NO_SHADOW_PAIR)
        expected[request.request_id] = before + ShadowPair(1, agreed[B], agreed[A])
    assert 0 in {at for at, _ in kept}, "behind a prompt that fills a block"
    assert {done.request_id for done in one.finished.values() if done.shadow_pair.drafts} == {
        request.request_id for request in asked if is_watched(request.seed)
    }
    for request_id, pair_of_it in expected.items():
        assert one.finished[request_id].shadow_pair == pair_of_it
    assert 0 < compared(one).serving < compared(one).candidate


@pytest.mark.usefixtures("without_budget")
@pytest.mark.parametrize(("candidate", "serving"), [(B, A), (A, B)])
def test_a_good_model_scores_higher_than_one_of_random_weights(
    tiny_pair: TinyPair, candidate: str, serving: str
) -> None:
    one = engine_of(tiny_pair)
    kept = run(one, requests(depth=0, candidate=candidate, draft_model=serving)).kept
    found = compared(one)
    good, bad = found.candidate, found.serving
    if candidate == A:
        good, bad = bad, good
    assert good == sum(pair.depth for _, pair in kept), "it is the verifier itself"
    assert found.drafts == len(kept)
    assert bad < good / 4


@pytest.mark.usefixtures("without_budget")
@pytest.mark.parametrize("candidate", [A, B], ids=["the same", "of the same weights"])
def test_a_candidate_equal_to_the_serving_model_scores_equal(
    tiny_pair: TinyPair, candidate: str
) -> None:
    one = engine_of(tiny_pair, other=False)
    run(one, requests(5, FLAT, candidate=candidate, depth=2))
    assert compared(one).candidate == compared(one).serving > 0


@pytest.mark.usefixtures("without_budget")
def test_only_the_candidates_own_record_learns(tiny_pair: TinyPair) -> None:
    one = engine_of(tiny_pair)
    run(one, requests(depth=0))
    (count,) = one.engine.lessons(JOB).counts
    assert (count.proposer, count.agreed) == (B, compared(one).candidate)


@pytest.mark.usefixtures("without_budget")
def test_the_time_of_both_models_is_drafting_and_no_price_of_depth_0(tiny_pair: TinyPair) -> None:
    one = engine_of(tiny_pair)
    run(one, requests(depth=0))
    done = one.finished.values()
    assert sum(each.ticks.draft for each in done) == one.engine.stats.ticks.draft > 0
    assert sum(each.decode_sec for each in done) > sum(each.baseline_sec for each in done)


@pytest.mark.usefixtures("without_budget")
def test_a_row_without_a_model_of_its_own_is_compared_with_another_than_its_candidate(
    tiny_pair: TinyPair,
) -> None:
    one = engine_of(tiny_pair)
    kept = run(one, requests(depth=3, draft_model=None)).kept
    assert {(pair.candidate.name, pair.serving.name) for _, pair in kept} == {(B, A)}
    assert {done.provenance.sources for done in one.finished.values()} == {(A,)}


@pytest.mark.usefixtures("without_budget")
@pytest.mark.parametrize("depth", [None, 3])
def test_a_candidate_that_stands_alone_is_neither_compared_nor_verified(
    tiny_pair: TinyPair, depth: int | None
) -> None:
    one = bench(tiny_pair.verifier, tiny_pair.draft)
    assert not run(one, requests(draft_model=None, candidate=A, depth=depth)).kept
    assert one.engine.stats.proposed == 0


@pytest.mark.usefixtures("without_budget")
@pytest.mark.parametrize(
    ("scope", "compares"),
    [
        (SwitchScope(proposer=A), False),
        (SwitchScope(proposer=B), False),
        (SwitchScope(proposer=A.partition("@")[0]), False),
        (SwitchScope(tenant="search"), False),
        (SwitchScope(tenant="ads"), True),
        (SwitchScope(proposer="ngram"), True),
    ],
    ids=str,
)
def test_operators_switches_hold_for_both_models(
    tiny_pair: TinyPair, scope: SwitchScope, compares: bool
) -> None:
    one = engine_of(tiny_pair)
    one.engine.switch(off(scope))
    kept = run(one, requests(depth=0, scope=RowScope("search", JOB, ""))).kept
    assert bool(kept) is compares


@pytest.mark.usefixtures("without_budget")
@pytest.mark.parametrize(
    "values",
    [
        {"candidate": "draft-model@gone"},
        {"candidate": "block"},
        {"draft_model": "draft-model@gone"},
        {"draft_model": "none"},
        {"sources": frozenset({"ngram"})},
        {"max_depth": 0},
        {"verification": Verification.REJECTION},
        {"candidate": None},
    ],
    ids=str,
)
def test_nothing_is_drafted_where_nothing_can_be_compared(
    tiny_pair: TinyPair, values: dict[str, object]
) -> None:
    one = engine_of(tiny_pair)
    assert not run(one, requests(depth=0, **values)).kept
    drafting = one.runners[1:]
    assert all(r.blocks.untouched == r.blocks.num_blocks - 1 for r in drafting)


@pytest.mark.usefixtures("without_budget")
def test_a_cancelled_sequence_keeps_what_was_decided(tiny_pair: TinyPair) -> None:
    one = engine_of(tiny_pair)
    one.add(*requests(depth=0))
    for _ in range(5):
        one.step()
    done = one.engine.cancel(lambda _: True)
    assert sum((each.shadow_pair for each in done), NO_SHADOW_PAIR).drafts > 0
    assert not one.engine._speculator._pairs._waiting
    one.assert_all_blocks_are_free()


# --- what it may cost ---------------------------------------------------------------------------


def test_two_models_that_are_slow_take_their_share_of_the_time(clock: Clock) -> None:
    step_sec, call_sec = 0.1, 0.12
    models = [ModelSource(name, 0.5, clock, (call_sec, 0.0, 0.0)) for name in (A, B)]
    speculator = Speculator(models)
    request = Request("r", (1, 2), SamplingParams(max_tokens=10**6), seed=0, depth=0, candidate=B)
    sequences = [sequence_of(replace(request, draft_model=A)) for _ in range(2 * AT_ONCE)]
    busy = spent = 0.0
    for _ in range(8000):
        took = speculator.propose(sequences, lambda _, wanted: wanted, busy).drafting_sec
        spent += took
        busy += step_sec + took
        clock.now += step_sec
        for sequence in sequences:
            decide(sequence, [7])
    assert 0.9 * SHARE * busy <= spent <= SHARE * busy
    for model in models:
        assert max(map(len, model.asked)) == AT_ONCE


def test_time_that_was_not_used_is_saved_up_for_a_few_calls() -> None:
    made = Pairs()
    assert made.may_draft(0.0), "the first tells what drafts take"
    made.spend(1.0)
    assert not made.may_draft(1.9 / SHARE)
    assert made.may_draft(2.1 / SHARE)
    for _ in range(SAVED):
        assert made.may_draft(1e6)
        made.spend(1.0)
    assert not made.may_draft(1e6 + 0.9 / SHARE)
    assert made.may_draft(1e6 + 1.1 / SHARE)


# --- the judge by itself ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidate", "serving", "decided", "expected"),
    [
        ([1, 2, 3], [1, 9, 3], [1, 2, 3], ShadowPair(1, 3, 1)),
        ([9, 2, 3], [1, 2, 3], [1, 2, 3, 4], ShadowPair(1, 0, 3)),
        ([1, 2, 3], [1], [1, 2, 3], ShadowPair(1, 1, 1)),  # both count as far as both drafted
        ([1, 2, 3], [1, 2, 9], [1, 2], ShadowPair(1, 2, 2)),  # it ended
        ([1, 2, 3], [], [1, 2, 3], NO_SHADOW_PAIR),
        ([1, 2, 3], [1, 2, 3], [], NO_SHADOW_PAIR),
    ],
)
def test_both_drafts_are_judged_by_the_same_places(
    candidate: list[int], serving: list[int], decided: list[int], expected: ShadowPair
) -> None:
    sequence, made = sequence_of(), Pairs()
    decide(sequence, [5])
    made.keep(pair_of(sequence, candidate, serving), track := Tracks({}).track(B, "", None))
    decide(sequence, decided)
    made.forget(sequence)
    made.forget(sequence)
    assert sequence.shadow_pair == sequence.completion().shadow_pair == expected
    assert track.agreed == expected.candidate


def test_drafts_wait_until_all_their_places_are_decided() -> None:
    sequence, made = sequence_of(), Pairs()
    made.keep(pair_of(sequence, [1, 2], [1, 3]), Tracks({}).track(B, "", None))
    decide(sequence, [1])
    made.compare()
    assert sequence.shadow_pair == NO_SHADOW_PAIR
    decide(sequence, [2])
    made.compare()
    made.compare()
    assert sequence.shadow_pair == ShadowPair(1, 2, 1)


def pair_of(sequence: Sequence, candidate: list[int], serving: list[int]) -> Pair:
    models = Source(B, 0.0), Source(A, 0.0)
    return Pair(sequence, *models, DEPTH, {B: candidate, A: serving})


def test_pairs_add_up() -> None:
    assert ShadowPair(1, 2, 3) + ShadowPair(10, 20, 30) == ShadowPair(11, 22, 33)
