"""Several draft models beside one verifier: who is asked, for what, and at what price."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
from engine.decoding import Bench, assert_same, baseline_of, bench, runner_of
from engine.decoding import prompts as make_prompts
from engine.replaying import PLAIN
from engine.routed import FakeModel, Simulation

from specbatch.pipeline.engines.contract import Cohort, Request
from specbatch.pipeline.engines.exact.draft_model import DraftModelProposer
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.exact.host import EngineHost
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.engines.speculation.options import Option
from specbatch.pipeline.engines.speculation.router import Router
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.engines.state.step import Planned, Step
from specbatch.pipeline.policy import tuning
from specbatch.pipeline.policy.acceptance import Tracks
from specbatch.pipeline.policy.depth import Controller
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.schemas.records import SamplingParams
from specbatch.schemas.spec import EngineSpec
from specbatch.schemas.speculation import DecisionAction
from specbatch.schemas.speculation_spec import SpeculationSpec
from support.engines import loaded
from support.grids import pairwise
from support.models import TinyPair

pytestmark = pytest.mark.pipeline  # simulates thousands of steps

A, B = "draft-model", "draft-model@b"
CHEAP, DEAR = 0.005, 0.03  # seconds of a pass; the verifier's takes 0.1


def best_alone(*models: FakeModel, tags: tuple[str, ...]) -> float:
    """Tokens per second with the better of the models, had it been the only one."""
    speeds = []
    for model in models:
        alone = Simulation(
            [FakeModel(model.name, model.rates, model.price[1], model.price[2])], tags
        )
        alone.steps(1500)
        speeds.append(alone.steps(2500).tokens_per_sec)
    return max(speeds)


@pytest.mark.parametrize("elsewhere", [0.3, 0.75], ids=["hopeless", "mediocre"])
def test_each_model_gets_the_rows_of_the_tag_that_it_is_good_at(elsewhere: float) -> None:
    """Though nobody says which: and a model better than a stranger's guess hides none for good."""
    models = [
        FakeModel(A, {"en": 0.92, "de": elsewhere}, CHEAP / 2),
        FakeModel(B, {"en": elsewhere, "de": 0.92}, CHEAP / 2),
    ]
    simulation = Simulation(models, ("en", "de"))
    simulation.steps(1500)
    run = simulation.steps(2500)
    assert run.share("en", A) >= 0.9, run.drafted
    assert run.share("de", B) >= 0.9, run.drafted
    assert run.tokens_per_sec >= 1.05 * best_alone(*models, tags=("en", "de"))
    told = [d for d in simulation.decisions() if d.action is DecisionAction.ROUTED]
    last = {tag: [d for d in told if f"tagged {tag} " in d.reason][-1] for tag in ("en", "de")}
    assert {tag: d.proposer for tag, d in last.items()} == {"en": A, "de": B}
    assert len(told) <= 6, "told when it is new"


def test_time_for_drafting_is_shared_by_the_price_of_who_drafted() -> None:
    """A model of ten times the price must not draft at its neighbours' expense."""
    models = [FakeModel(A, {"en": 0.9}, CHEAP, 1e-4), FakeModel(B, {"en": 0.9}, 10 * CHEAP, 1e-3)]
    simulation = Simulation(models, ("en",), count=4)
    speculator, (_, second, *rest) = simulation.speculator, simulation.running
    for depth in (2, 4, 8):  # prices are learned
        for model in models:
            model.propose([second, *rest][:depth], [depth] * len([second, *rest][:depth]))
    for sequence in simulation.running:
        fixed = replace(sequence.request, depth=4, draft_model=B if sequence is second else A)
        sequence.request = fixed
    plan = speculator.propose(simulation.running, lambda _, wanted: wanted)
    assert [draft.proposer for draft in plan.drafts] == [A, B, A, A]
    planned = [Planned(sequence, 1) for sequence in simulation.running]
    (one,) = (step := Step(planned, simulation.running, plan, 0, 1)).passes([step])
    cheap, dear, *others = one.draft_weights
    assert others == [cheap, cheap]
    assert 9 <= dear / cheap <= 11


def test_time_for_drafting_of_one_model_is_shared_by_tokens() -> None:
    simulation = Simulation([FakeModel(A, {"en": 0.9}, CHEAP)], ("en",), count=3)
    for depth, sequence in enumerate(simulation.running, start=1):
        sequence.request = replace(sequence.request, depth=depth)
    plan = simulation.speculator.propose(simulation.running, lambda _, wanted: wanted)
    planned = [Planned(sequence, 1) for sequence in simulation.running]
    (one,) = (step := Step(planned, simulation.running, plan, 0, 1)).passes([step])
    first = one.draft_weights[0]
    assert list(one.draft_weights) == [first, 2 * first, 3 * first]


@pytest.mark.parametrize("first", ["dear", "cheap"])
def test_a_gain_smaller_than_its_price_is_not_bought(first: str) -> None:
    cheap = FakeModel(A if first == "cheap" else B, {"en": 0.8}, CHEAP)
    dear = FakeModel(B if first == "cheap" else A, {"en": 0.84}, DEAR)
    simulation = Simulation([cheap, dear] if first == "cheap" else [dear, cheap], ("en",))
    simulation.steps(1500)
    run = simulation.steps(2500)
    assert run.share("en", cheap.name) >= 0.95, run.drafted
    assert run.tokens_per_sec >= 0.97 * best_alone(cheap, dear, tags=("en",))


def test_a_gain_greater_than_its_price_is_bought() -> None:
    cheap, dear = FakeModel(A, {"en": 0.4}, CHEAP), FakeModel(B, {"en": 0.93}, DEAR)
    simulation = Simulation([cheap, dear], ("en",))
    simulation.steps(1500)
    run = simulation.steps(2500)
    assert run.share("en", B) >= 0.95, run.drafted
    assert run.tokens_per_sec >= 0.97 * best_alone(cheap, dear, tags=("en",))


def test_two_models_are_not_run_where_one_does_for_all() -> None:
    """Each is a little better at its tag, and the passes of both cost more than that brings."""
    models = [
        FakeModel(A, {"en": 0.84, "de": 0.80}, DEAR),
        FakeModel(B, {"en": 0.80, "de": 0.84}, DEAR),
    ]
    simulation = Simulation(models, ("en", "de"))
    simulation.steps(1500)
    run = simulation.steps(2500)
    assert run.mixed <= 0.02 * 2500
    assert run.tokens_per_sec >= 0.97 * best_alone(*models, tags=("en", "de"))


def test_sequences_stay_where_they_are_between_models_alike() -> None:
    models = [FakeModel(A, {"en": 0.8}, CHEAP), FakeModel(B, {"en": 0.8}, CHEAP)]
    simulation = Simulation(models, ("en",), seed=1)  # of one luck: models change places seldom
    simulation.steps(500)
    run = simulation.steps(4000)
    assert max(run.share("en", A), run.share("en", B)) >= 0.98, "but for trials"
    assert run.moves <= 0.6 * run.tokens / 400, "moves per sequence, trials and back included"
    assert run.tokens_per_sec >= 0.97 * best_alone(*models, tags=("en",))


def test_a_model_that_is_not_asked_reads_next_to_nothing() -> None:
    good, bad = FakeModel(A, {"en": 0.9}, CHEAP, 5e-4), FakeModel(B, {"en": 0.2}, CHEAP, 5e-4)
    simulation = Simulation([good, bad], ("en",), length=2000)
    simulation.steps(500)
    bad.fed, bad.seconds = 0, 0.0
    run = simulation.steps(4000)
    assert bad.fed <= 0.02 * run.tokens
    assert bad.seconds <= 0.01 * run.seconds


def test_what_must_be_read_first_is_counted() -> None:
    """Two models alike but for reading: near its end no sequence is worth a change of models."""
    slow_reader = FakeModel(B, {"en": 0.85}, CHEAP, row_sec=5e-3)
    simulation = Simulation([FakeModel(A, {"en": 0.8}, CHEAP), slow_reader], ("en",), length=60)
    simulation.steps(1000)
    assert simulation.steps(2000).share("en", A) >= 0.9


def test_a_model_whose_drafts_grow_bad_hands_its_rows_over() -> None:
    models = [FakeModel(A, {"en": 0.92}, CHEAP), FakeModel(B, {"en": 0.8}, CHEAP)]
    simulation = Simulation(models, ("en",))
    simulation.steps(1000)
    assert simulation.steps(500).share("en", A) >= 0.9
    models[0].rates = {"en": 0.3}
    simulation.steps(300)
    assert simulation.steps(500).share("en", B) >= 0.9


def test_a_model_that_was_left_when_it_grew_bad_is_tried_again_and_gets_its_rows_back() -> None:
    models = [FakeModel(A, {"en": 0.9}, CHEAP), FakeModel(B, {"en": 0.8}, CHEAP)]
    simulation = Simulation(models, ("en",), count=4)
    simulation.steps(500)
    assert simulation.steps(250).share("en", A) >= 0.9
    models[0].rates = {"en": 0.4}
    simulation.steps(500)
    assert simulation.steps(250).share("en", B) >= 0.9
    models[0].rates = {"en": 0.97}
    simulation.steps(20_000)
    assert simulation.steps(500).share("en", A) >= 0.95


class Looks:
    """A router alone, of which two models are one as dear as the other, and what is known of A."""

    def __init__(self) -> None:
        knowledge = Knowledge()
        for size in [*range(8, 8 * 9)] * 10:
            knowledge.step_time.observe(size, 8, 0.1 + 1e-3 * size)
        self._models = [FakeModel(name, {}, CHEAP) for name in (A, B)]
        for model in self._models:
            cost = knowledge.draft_time_of(model.name)
            for depth in range(1, 9):
                cost.observe((1.0, depth, 8.0 * depth), 1e-3 + CHEAP * depth)
        self.known = Tracks({}).track(A, "job", None)
        self._router = Router(self._models, Controller(knowledge), lambda *_: self.known)

    def picked(self, rates: Seq[float], routes: Seq[Cohort]) -> list[list[Option]]:
        sequences = [Sequence(replace(PLAIN, route=r), frozenset(), 400) for r in routes]
        return [
            [Option(s, m, 8, rate, rate) for m, rate in zip(self._models, rates, strict=True)]
            for s in sequences
        ]

    def replan(self, step: int, *rates: float, routes: Seq[Cohort] = ()) -> tuple[str, list[str]]:
        """Whom the first row goes to, where the models have these rates, and who is tried."""
        options = self.picked(rates, routes or [Cohort("job")] * 8)
        self._router.begin(8)
        picked = self._router.pick(options, step)
        tried = self._router.trial(options, picked, False, step)
        return picked[0].proposer.name, [option.proposer.name for option in tried]

    @property
    def remembered(self) -> int:
        return len(self._router._asked_at)


def test_hope_fades_from_when_a_model_was_asked_last_not_from_its_last_trial() -> None:
    replans = Looks()
    assert replans.replan(100, 0.5, 0.6) == (B, [A] * 8), "nothing is known of it yet"
    replans.known.observe(200, 100)
    replans.known.fold()
    replans.known.levels[-1].agreed, replans.known.levels[-1].tested = 90.0, 200.0
    assert replans.replan(20_000, 0.95, 0.6)[0] == A
    assert replans.replan(20_064, 0.45, 0.6) == (B, []), "it has just been left"
    assert replans.replan(60_000, 0.45, 0.6) == (B, [A] * 8)


def test_when_models_were_asked_is_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MOST_ASKED", 1000)
    replans, tried = Looks(), 0
    for i in range(10_000 // 8):
        routes = [Cohort(f"{i} {k}") for k in range(8)]
        tried += bool(replans.replan(1000 * i, 0.5, 0.6, routes=routes)[1])
    assert tried > 1000
    assert replans.remembered == 1000


@pytest.mark.parametrize("pinned", [A, B])
def test_a_pinned_row_asks_its_model_only(pinned: str) -> None:
    models = [FakeModel(A, {"en": 0.8}, CHEAP), FakeModel(B, {"en": 0.8}, CHEAP)]
    run = Simulation(models, ("en",), draft_model=pinned).steps(500)
    assert run.drafted["en", pinned] > 500
    assert run.drafted.total() == run.drafted["en", pinned]


def test_a_row_pinned_to_no_model_asks_none() -> None:
    models = [FakeModel(A, {"en": 0.8}, CHEAP), FakeModel(B, {"en": 0.8}, CHEAP)]
    run = Simulation(models, ("en",), draft_model="none").steps(300)
    assert run.drafted.total() == 0
    assert run.tokens == 300 * 8


# --- the engine ---------------------------------------------------------------------------------
def two_models(pair: TinyPair, num_blocks: int = 1024) -> Bench:
    """An engine with the tiny draft model, and beside it the verifier as its own draft model."""
    made = bench(pair.verifier, pair.draft, draft_blocks=num_blocks)
    copy = runner_of(loaded(pair.verifier, "float32"), num_blocks)
    models = [DraftModelProposer(made.runners[1]), DraftModelProposer(copy, name=B)]
    engine = Engine(made.runners[0], (made.blocks, *models), 64, 2048)
    return Bench(engine, [*made.runners, copy], made.blocks)


def requests_of(
    prompts: Seq[tuple[int, ...]], params: SamplingParams, depth: int | None
) -> list[Request]:
    """Rows of two tags; every fourth is pinned to a model, every other fourth to none."""
    pins = (None, B, None, "none", A)
    return [
        Request(
            str(i),
            prompt,
            params,
            seed=1000 + i,
            depth=depth,
            route=Cohort("job", "even" if i % 2 == 0 else "odd"),
            draft_model=pins[i % len(pins)],
        )
        for i, prompt in enumerate(prompts)
    ]


@pairwise(num_blocks=[1024, 9], temperature=[0.0, 0.8], depth=[None, 4])
def test_outputs_are_those_of_depth_0_and_all_caches_come_back(
    tiny_pair: TinyPair, depth: int | None, temperature: float, num_blocks: int
) -> None:
    params = SamplingParams(max_tokens=40, temperature=temperature, ignore_eos=True)
    plain = baseline_of(tiny_pair.verifier)
    made = two_models(tiny_pair, num_blocks)
    requests = requests_of(make_prompts(15), params, depth)
    done = made.add(*requests).run()
    for request in requests:
        assert_same(done[request.request_id], plain(request))
        if request.draft_model == "none":
            assert done[request.request_id].proposed == 0
    drafted = [done[r.request_id] for r in requests if r.draft_model == B]
    assert sum(c.accepted for c in drafted) > 0, "the verifier's copy was asked"
    made.assert_all_blocks_are_free()


def test_the_host_makes_a_proposer_of_every_draft_model(tiny_pair: TinyPair) -> None:
    folders = [inspect_model(str(path)) for path in (tiny_pair.verifier, tiny_pair.draft)]
    alone, pair = (
        EngineHost(
            folders[0], folders[1], 4, 64, kv_cache_bytes=8 << 20, extra_draft_models=further
        )
        for further in ((), (folders[0],))
    )
    spec = EngineSpec(dtype="float32")
    alone.make_engine(spec)
    engine = pair.make_engine(spec)
    assert pair.memory is not None
    assert alone.memory is not None
    assert pair.memory.kv_cache == pytest.approx(alone.memory.kv_cache * 3 / 2, rel=0.05)
    assert set(engine.knowledge.draft_times) == {A, "draft-model@verifier"}
    pins = pair.tag_models(SpeculationSpec(routes=(("de", "verifier"), ("en", "draft"))))
    assert pins == {"de": "draft-model@verifier", "en": A}


def test_what_is_learned_of_a_draft_model_is_learned_of_its_files(tiny_pair: TinyPair) -> None:
    verifier, draft = (inspect_model(str(path)) for path in (tiny_pair.verifier, tiny_pair.draft))
    for draft_model in (draft, verifier):  # the verifier's copy drafts under the same name
        engine = EngineHost(verifier, draft_model, 4, 64, 8 << 20).make_engine(
            EngineSpec(dtype="float32")
        )
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        engine.add(Request("a/0", (5, 6, 7), params, seed=1, route=Cohort("a")))
        while not engine.idle:
            engine.step()
        learned = {c.proposer: c.fingerprint for c in engine.lessons("a").counts}
        assert learned[A] == draft_model.fingerprint.digest
