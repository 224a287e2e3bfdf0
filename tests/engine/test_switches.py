"""Drafting that an operator switches off in the middle of work: from the next step on there are no
drafts, outputs stay those of depth 0 to the bit, and once it is on again drafts return."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from engine.decoding import Bench, assert_same, baseline_of, bench, prompts
from engine.simulating import Clock, ModelSource, Simulation, Source, clock, depths_of, simulation
from engine.test_observing import Recorder

from specbatch.pipeline.engines.contract import Cohort, Request
from specbatch.pipeline.engines.service import EngineService
from specbatch.schemas.draft_switches import (
    ALL_ON,
    DraftSwitch,
    DraftSwitches,
    RowScope,
    SwitchScope,
)
from specbatch.schemas.records import SamplingParams
from specbatch.schemas.speculation import ALL_PROPOSERS, Decision, DecisionAction
from support.models import TinyPair

__all__ = ["clock"]
PARAMS = SamplingParams(max_tokens=40, temperature=0.8, ignore_eos=True)
JOB = "job"
EVERYTHING = SwitchScope()


def off(*scopes: SwitchScope) -> DraftSwitches:
    return DraftSwitches(tuple(DraftSwitch(scope, 1.0, "alice", "it is slow") for scope in scopes))


def requests(count: int = 8, **values: object) -> list[Request]:
    """Of two tenants in turn, each with rows of two tags."""
    made = []
    for i, prompt in enumerate(prompts(count, shortest=3)):
        tenant, tag = ("search", "ads")[i % 2], ("de", "fr")[i // 2 % 2]
        route, scope = Cohort(f"{JOB}-{tenant}", tag), RowScope(tenant, "nightly", tag)
        made.append(Request(f"{i}", prompt, PARAMS, i, depth=3, route=route, scope=scope))
    return [replace(request, **values) for request in made]  # type: ignore[arg-type]  # fields of it


def proposed_in(one: Bench, steps: int) -> Counter[str]:
    """Draft tokens of so many steps, by request."""
    before = {s.request.request_id: s.proposed for s in one.engine.unfinished}
    for _ in range(steps):
        one.step()
    return Counter(
        {
            s.request.request_id: s.proposed - before[s.request.request_id]
            for s in one.engine.unfinished
        }
    )


def decisions_of(one: Bench | Simulation, job: str) -> list[Decision]:
    made = one.speculator.decision_log if isinstance(one, Simulation) else one.engine
    return list(made.lessons(job).decisions)


# --- the engine ---------------------------------------------------------------------------------


def test_drafts_end_with_the_next_step_and_return(tiny_pair: TinyPair) -> None:
    asked = requests()
    one = bench(tiny_pair.verifier, tiny_pair.draft, passes_at_once=1).add(*asked)
    proposed_in(one, 2)
    assert min(proposed_in(one, 1).values()) > 0
    one.engine.switch(off(EVERYTHING))
    assert not any(proposed_in(one, 6).values())
    one.engine.switch(ALL_ON)
    assert min(proposed_in(one, 2).values()) > 0
    one.run()
    for request in asked:
        assert_same(one.finished[request.request_id], baseline_of(tiny_pair.verifier)(request))
    one.assert_all_blocks_are_free()


@pytest.mark.parametrize(
    ("scope", "still"),
    [
        (SwitchScope(tenant="search"), "1357"),
        (SwitchScope(tag="de"), "2367"),
        (SwitchScope(tenant="search", tag="de"), "123567"),
        (SwitchScope(job_name="hourly"), "01234567"),
        (SwitchScope(job_name="nightly"), ""),
        (SwitchScope(proposer="draft-model"), ""),
        (SwitchScope(proposer="ngram"), "01234567"),
    ],
    ids=str,
)
def test_only_what_a_switch_covers_is_off(
    tiny_pair: TinyPair, scope: SwitchScope, still: str
) -> None:
    asked = requests()
    one = bench(tiny_pair.verifier, tiny_pair.draft).add(*asked)
    one.engine.switch(off(scope))
    one.step()
    proposed = proposed_in(one, 3)
    assert {name for name, tokens in proposed.items() if tokens} == set(still)
    one.run()
    for request in asked:
        assert_same(one.finished[request.request_id], baseline_of(tiny_pair.verifier)(request))


def test_nothing_is_sampled_in_shadow_or_for_drift_meanwhile(tiny_pair: TinyPair) -> None:
    told = Recorder()
    one = bench(tiny_pair.verifier, tiny_pair.draft, observer=told, drift_every=1)
    one.engine.switch(off(EVERYTHING))
    one.add(*requests(depth=0, shadow=True)).run()
    assert one.runners[1].blocks.untouched == one.runners[1].blocks.num_blocks - 1
    assert sum(done.shadow_proposed for done in one.finished.values()) == 0
    assert told.drifts == []


def test_a_service_hands_over_what_came_before_its_engine(tiny_pair: TinyPair) -> None:
    one = bench(tiny_pair.verifier, tiny_pair.draft)
    service = EngineService(lambda: one.engine)
    service.switch(off(EVERYTHING))
    done = service.submit(JOB, requests()).wait(60)
    assert [completion.proposed for completion in done] == [0] * len(done)
    service.switch(ALL_ON)
    done = service.submit(JOB, requests()).wait(60)
    assert min(completion.proposed for completion in done) > 0
    service.close()


def test_the_decisions_of_each_job_name_who_switched_and_why(tiny_pair: TinyPair) -> None:
    one = bench(tiny_pair.verifier, tiny_pair.draft).add(*requests())
    one.engine.switch(off(SwitchScope(tenant="search"), SwitchScope(proposer="ngram")))
    one.step()
    one.step()
    one.engine.switch(ALL_ON)
    one.run()
    assert [(d.action, d.proposer, d.reason) for d in decisions_of(one, f"{JOB}-search")] == [
        (DecisionAction.SWITCHED_OFF, ALL_PROPOSERS, "switched off by alice: it is slow"),
        (DecisionAction.SWITCHED_ON, ALL_PROPOSERS, "alice had switched it off: it is slow"),
    ]
    assert decisions_of(one, f"{JOB}-ads") == []  # it has no n-grams


# --- the choice of depths -----------------------------------------------------------------------


def test_chosen_depths_are_0_and_nothing_is_tried_while_all_is_off(clock: Clock) -> None:
    made = simulation(clock, Source("ngram", 0.8), ModelSource("draft-model", 0.7, clock))
    made.run(20)
    assert sum(source.drafted for source in made.proposers) > 0
    replans = made.speculator._replans
    made.speculator.switch(off(EVERYTHING))
    for source in made.proposers:
        source.take_asked()
    made.run(2000)
    assert [source.take_asked() for source in made.proposers] == [[], []]
    assert made.speculator._replans == replans, "it costs nothing either"
    made.speculator.switch(ALL_ON)
    made.run(3)
    assert sum(source.drafted for source in made.proposers) > 0


def test_who_is_left_drafts_instead(clock: Clock) -> None:
    model = ModelSource("draft-model", 0.9, clock, prices=(1e-5, 1e-5, 1e-7))
    made = simulation(clock, Source("ngram", 0.6), model)
    made.run(50)
    assert model.drafted
    made.speculator.switch(off(SwitchScope(proposer="draft-model")))
    model.take_asked()
    made.proposers[0].take_asked()
    made.run(2000)
    assert model.take_asked() == []
    assert made.proposers[0].drafted > 0


def test_sequences_that_arrive_later_go_without_too(clock: Clock) -> None:
    source = Source("ngram", 0.9)
    made = simulation(clock, source)
    made.speculator.switch(off(SwitchScope(tag="de")))
    made.run(2)
    tagged = made.add(4, scope=RowScope("default", "nightly", "de"))
    source.take_asked()
    made.run(200)
    assert source.drafted > 0
    assert not set(depths_of(source)) & set(tagged)


def test_what_had_been_found_off_is_no_reason_for_an_alert_any_more(clock: Clock) -> None:
    """A decision took its place; once it is on again, it is found anew."""
    source = Source("ngram", 0.9)
    made = simulation(clock, source)
    log = made.speculator.decision_log
    is_off: dict[str, bool] = {}
    fell: dict[str, bool] = {}
    log.on_decision = lambda _, proposer, off_now: is_off.update({proposer: off_now})
    log.on_collapse = lambda _, proposer, fell_now: fell.update({proposer: fell_now})
    source.rate = lambda _: 0.0

    def is_found() -> bool:
        return fell.get("ngram", False) and is_off.get("ngram", False)

    made.run_until(is_found, 6000)
    made.speculator.switch(off(EVERYTHING))
    made.run(1)
    assert not any(is_off.values())
    assert fell == {"ngram": False}
    made.speculator.switch(ALL_ON)
    made.run_until(is_found, 6000)
