"""Counts and ends of the vLLM engine that are easily lost: inside drafts, where a part fails."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
from vllm_engine.fake_core import CONTEXT, LOGPROB, VOCABULARY, FakeCore, output_of
from vllm_engine.test_engine import (
    BLOCK,
    GREEDY,
    SAMPLED,
    SOUND,
    TOKENS,
    WAYS,
    Made,
    prompt_of,
    request,
    right,
)

from specbatch.pipeline.engines.contract import Completion
from specbatch.pipeline.engines.proposers.history import History
from specbatch.pipeline.engines.service import EngineService
from specbatch.pipeline.engines.vllm.core import Core, Emitted
from specbatch.pipeline.engines.vllm.engine import PASSED_OVER, VllmEngine
from specbatch.schemas.errors import EngineError
from specbatch.schemas.provenance import TICKS_PER_SEC
from specbatch.schemas.records import FinishReason, Origin, SamplingParams
from specbatch.schemas.speculation import PastOutput

WITHOUT_SPECULATION = replace(SAMPLED, min_p=0.1)


class Counting(FakeCore):
    """Counts the draft tokens that it verified."""

    verified = 0

    def step(self) -> list[Emitted]:
        emitted = super().step()
        self.verified += sum(event.drafted for event in emitted)
        return emitted


class Counted(Made):
    """An engine whose one core counts."""

    def __init__(self) -> None:
        super().__init__()
        self.core = Counting()
        self.engine = engine_on(self.core)

    def check(self, done: dict[str, Completion]) -> None:
        stats = self.engine.stats
        assert sum(c.proposed for c in done.values()) == stats.proposed == self.core.verified
        assert sum(c.accepted for c in done.values()) == stats.accepted
        assert sum(len(c.token_ids) for c in done.values()) == stats.generated_tokens
        assert sum(c.verifier_passes for c in done.values()) == stats.verifier_passes
        assert stats.busy_sec == pytest.approx(stats.ticks.total / TICKS_PER_SEC)
        for c in done.values():
            assert len(c.origins) == len(c.logprobs) == len(c.token_ids)
            assert c.proposed == sum(c.provenance.drafted) == sum(c.proposed_at_depth)
            assert c.accepted == sum(c.accepted_at_depth) >= c.origins.count(Origin.ACCEPTED)
            assert c.origins.count(Origin.CORRECTED) == len(c.provenance.rejected)
            assert len(c.provenance.steps) == c.verifier_passes


def engine_on(core: FakeCore) -> VllmEngine:
    of = cast(Core, core)
    return VllmEngine(lambda _: of, lambda _: SOUND, VOCABULARY, frozenset({2}), 4)


def ends_at(token: int) -> Callable[[], Callable[[int], bool]]:
    return lambda: lambda decided: decided == token


def drafted(number: int, params: SamplingParams = GREEDY, depth: int = 4) -> dict[str, object]:
    return {"params": params, "draft_ids": right(number), "depth": depth, "sources": BLOCK}


# --- counts -------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", WAYS)
def test_what_is_counted_is_what_the_core_verified(way: str) -> None:
    one = Counted()
    one.check(one.run([request(n, **WAYS[way](n)) for n in range(9)]))


@pytest.mark.parametrize("at", range(2, 12))
def test_a_stop_token_anywhere_in_a_draft_is_counted_with_it(at: int) -> None:
    one = Counted()
    done = one.run([request(0, **drafted(0, replace(GREEDY, stop_token_ids=(right(0)[at],))))])
    assert done["r0"].token_ids == right(0)[: at + 1]
    one.check(done)


def test_a_stop_string_inside_a_draft_ends_the_output() -> None:
    one = Counted()
    params = replace(GREEDY, stop=("x",))
    done = one.run([
        request(0, watch_text=ends_at(right(0)[7]), **drafted(0, params)),
        request(1),
    ])  # fmt: skip
    assert done["r0"].token_ids == right(0)[:8]
    assert done["r0"].finish_reason is FinishReason.STOP
    assert done["r1"].token_ids == right(1)
    one.check(done)


@pytest.mark.parametrize("depth", [0, 4])
def test_likely_tokens_are_as_many_as_tokens(depth: int) -> None:
    for stop in (right(0)[9], 2):
        params = replace(GREEDY, top_logprobs=2, stop_token_ids=(stop,))
        done = Made().run([request(0, **drafted(0, params, depth))])["r0"]
        assert done.top_logprobs is not None
        assert [ids[0] for ids, _ in done.top_logprobs] == list(done.token_ids)
        assert set(done.logprobs) == {LOGPROB}


def test_a_lone_request_that_is_put_off_pays_for_the_step() -> None:
    one = Counted()
    one.core.preempt = {4: "r0", 9: "r0"}
    done = one.run([request(0, **drafted(0, depth=1))])
    assert done["r0"].token_ids == right(0)
    assert one.engine.stats.preemptions == 2
    one.check(done)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_together_outputs_and_counts_are_right(seed: int) -> None:
    chance, one = random.Random(seed), Counted()
    given, wanted = [], {}
    for n in range(14):
        truth, stop = right(n), chance.choice([None, *right(n)])
        params = replace(
            chance.choice([GREEDY, SAMPLED]),
            max_tokens=chance.randint(1, TOKENS),
            stop_token_ids=() if stop is None else (stop,),
            top_logprobs=chance.choice([0, 2]),
        )
        draft = list(truth)
        for _ in range(chance.choice([0, 1, 5])):
            draft[chance.randrange(TOKENS)] = chance.randrange(VOCABULARY)
        given.append(
            request(
                n,
                params,
                draft_ids=tuple(draft[: chance.randint(0, TOKENS)]),
                depth=chance.choice([None, 0, 1, 2, 4, 9]),
                past_ids=chance.choice([(), truth, right(n + 1)]),
            )
        )
        end = params.max_tokens if stop is None else truth.index(stop) + 1
        wanted[f"r{n}"] = truth[: min(end, params.max_tokens)]
    one.core.preempt = {chance.randint(2, 40): f"r{chance.randrange(14)}" for _ in range(12)}
    one.core.most_drafted = chance.choice([1, 2, 99])
    done = one.run(given)
    assert {name: c.token_ids for name, c in done.items()} == wanted
    one.check(done)


# --- outputs ------------------------------------------------------------------------------------
@pytest.mark.parametrize("depth", [None, 0, 3])
def test_earlier_outputs_change_no_output(depth: int | None) -> None:
    past = [PastOutput("last", str(n), 0, right(n)) for n in range(6)]
    index = History.build(past, 10_000).index
    for more in ("own", "another's", "index"):
        one = Counted()
        hints: list[dict[str, object]] = [
            {
                "own": {"past_ids": right(n)},
                "another's": {"past_ids": right(n + 1)},
                "index": {"history": index},
            }[more]
            for n in range(6)
        ]
        done = one.run([request(n, depth=depth, **hints[n]) for n in range(6)])
        assert [done[f"r{n}"].token_ids for n in range(6)] == [right(n) for n in range(6)]
        one.check(done)
        if depth and more != "another's":
            assert {c.provenance.sources[0] for c in done.values()} == {"history"}
            assert all(c.accepted for c in done.values())


@pytest.mark.parametrize("depth", [0, 4])
def test_no_stop_token_ends_an_output_that_is_too_short(depth: int) -> None:
    stop = right(0)[4]
    params = replace(GREEDY, stop_token_ids=(stop,), min_tokens=10)
    one = Counted()
    done = one.run([request(0, **drafted(0, params, depth))])
    assert stop not in done["r0"].token_ids[:10]
    assert done["r0"].token_ids[:4] == right(0)[:4]
    one.check(done)


@pytest.mark.parametrize("depth", [0, 3, 4])
def test_the_context_ends_an_output_inside_a_draft_too(depth: int) -> None:
    prompt = prompt_of(0, CONTEXT - 9)
    truth = output_of(prompt, 9)
    one = Counted()
    done = one.run([request(0, prompt_ids=prompt, draft_ids=truth, depth=depth, sources=BLOCK)])
    assert done["r0"].token_ids == truth
    assert done["r0"].finish_reason is FinishReason.LENGTH
    one.check(done)


def test_a_draft_outside_the_vocabulary_is_dropped() -> None:
    done = Made().run([request(0, draft_ids=(11, VOCABULARY), depth=4, sources=BLOCK)])["r0"]
    assert (done.token_ids, done.proposed) == (right(0), 0)


def test_an_end_token_of_the_model_ends_the_output_unless_ignored() -> None:
    made = Made()
    made.engine._eos_ids = frozenset({right(0)[5]})
    on = replace(request(0, replace(GREEDY, ignore_eos=True)), request_id="on")
    done = made.run([request(0), on])
    assert done["r0"].token_ids == right(0)[:6]
    assert done["on"].token_ids == right(0)


def test_shadow_drafts_are_compared_and_never_given() -> None:
    one = Counted()
    done = one.run([request(n, draft_ids=right(n), depth=0, shadow=True) for n in range(40)])
    assert one.core.verified == 0
    assert [done[f"r{n}"].token_ids for n in range(40)] == [right(n) for n in range(40)]
    assert sum(c.shadow_accepted for c in done.values()) > 0


# --- ends ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("depth", [0, 4])
def test_a_text_watch_that_raises_fails_its_request_alone(depth: int) -> None:
    def watch(_: int) -> bool:
        raise ValueError("no such text")

    params = replace(GREEDY, stop=("x",))
    made = Made()
    bad = request(1, watch_text=lambda: watch, **drafted(1, params, depth))
    done = made.run([request(0), bad, request(2)])
    assert done["r1"].finish_reason is FinishReason.ERROR
    assert "ValueError: no such text" in (done["r1"].error or "")
    assert len(done["r1"].provenance.steps) == done["r1"].verifier_passes == 1
    assert [done[f"r{n}"].token_ids for n in (0, 2)] == [right(0), right(2)]


def test_nan_in_a_drafted_step_fails_one_request_alone() -> None:
    made = Made()
    for n in range(3):
        made.engine.add(request(n, **drafted(n)))
    made.engine.step()
    made.cores[0].nan = {"r1"}
    done = made.finish()
    assert "NaN" in (done["r1"].error or "")
    assert [done[f"r{n}"].token_ids for n in (0, 2)] == [right(0), right(2)]
    assert made.cores[0].computed("r1") is None


def test_a_cancelled_request_leaves_the_core_and_its_id_can_come_again() -> None:
    made = Made()
    made.engine.add(request(0))
    made.engine.step()
    dropped = made.engine.cancel(lambda _: True)
    assert made.cores[0].computed("r0") is None
    assert made.engine.idle
    made.engine.add(request(0))
    assert made.finish(dropped)["r0"].token_ids == right(0)


@pytest.mark.parametrize("late", [WITHOUT_SPECULATION, GREEDY], ids=["without", "with"])
def test_nobody_waits_for_ever_for_the_other_core(late: SamplingParams) -> None:
    made, early = Made(), GREEDY if late is WITHOUT_SPECULATION else WITHOUT_SPECULATION
    made.engine.add(request(0, early))
    made.engine.step()
    made.engine.add(request(1, late))
    for n in range(2, 120):
        made.engine.add(request(n, early))
    done: list[str] = []
    while "r1" not in done:
        done += [c.request_id for c in made.engine.step()]
    assert len(done) <= 4 * (PASSED_OVER + 2)
    assert [core.closed for core in made.cores] == [True, False]


def test_a_failed_step_fails_those_that_wait_too() -> None:
    made: list[VllmEngine] = []

    def make() -> VllmEngine:
        core = FakeCore()
        core.raises = {} if made else {2: RuntimeError("broken")}
        made.append(engine_on(core))
        return made[-1]

    service = EngineService(make)
    try:
        ticket = service.submit("one", [request(n) for n in range(7)])
        with pytest.raises(EngineError, match="broken"):
            ticket.wait(30)
        (done,) = service.submit("another", [request(8)]).wait(30)
        assert done.token_ids == right(8)
    finally:
        service.close()
    assert len(made) == 2
