"""The vLLM engine on a core without a model: outputs, accounts, and who shares a batch."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace

import pytest
from vllm_engine.fake_core import CONTEXT, VOCABULARY, FakeCore, output_of

from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.pipeline.engines.service import EngineService, made
from specbatch.pipeline.engines.vllm.engine import PASSED_OVER, VllmEngine
from specbatch.pipeline.engines.vllm.probe import Verdict
from specbatch.schemas.draft_switches import (
    ALL_ON,
    DraftSwitch,
    DraftSwitches,
    RowScope,
    SwitchScope,
)
from specbatch.schemas.errors import (
    EngineError,
    ModelError,
    NoEngineError,
    RequestCancelledError,
)
from specbatch.schemas.provenance import NO_TICKS, Ticks
from specbatch.schemas.records import (
    NOT_LOOKED_AT,
    FinishReason,
    Origin,
    Recheck,
    SamplingParams,
)
from specbatch.schemas.speculation import PRE_GENERATED
from support.thirds import Thirds

TOKENS = 24
GREEDY = SamplingParams(max_tokens=TOKENS)
SAMPLED = replace(GREEDY, temperature=0.7)
SOUND, APART, OFF = (
    Verdict(True, True, True, True),
    Verdict(True, False, True, True),
    Verdict(False, False, False, False),
)
BLOCK = frozenset({PRE_GENERATED})


class Made:
    """An engine, and every core that it made."""

    def __init__(
        self,
        verdict: Verdict = SOUND,
        one_in: int = 64,
        own: list[int] | None = None,
        **of_core: object,
    ) -> None:
        self.cores: list[FakeCore] = []

        def make(drafted: bool) -> FakeCore:
            self.cores.append(FakeCore(drafted, **of_core))  # type: ignore[arg-type]  # options by name
            self.cores[-1].own = own if drafted else None
            return self.cores[-1]

        self.engine = VllmEngine(
            make,  # type: ignore[arg-type]  # a core without vLLM
            lambda _: verdict,
            VOCABULARY,
            frozenset({2}),
            4,
            recheck_one_in=one_in,
            own_speculation=None if own is None else "eagle3",
        )

    def run(self, requests: Sequence[Request]) -> dict[str, Completion]:
        for request in requests:
            self.engine.add(request)
        return self.finish()

    def finish(self, dropped: Sequence[Completion] = ()) -> dict[str, Completion]:
        done: dict[str, Completion] = {}
        while not self.engine.idle:
            done |= {c.request_id: c for c in self.engine.step()}
            spent = [Ticks(*s.time) for s in self.engine.unfinished]
            spent += [c.ticks for c in (*done.values(), *dropped)]
            assert sum(spent, start=NO_TICKS) == self.engine.stats.ticks
        return done


def prompt_of(number: int, tokens: int = 12) -> tuple[int, ...]:
    pick = random.Random(number)
    return tuple(pick.randrange(10, VOCABULARY) for _ in range(tokens))


def right(number: int) -> tuple[int, ...]:
    return output_of(prompt_of(number), TOKENS)


def request(number: int, params: SamplingParams = GREEDY, **more: object) -> Request:
    made = Request(f"r{number}", prompt_of(number), params, seed=number)
    return replace(made, **more)  # type: ignore[arg-type]  # fields by name


WAYS: dict[str, Callable[[int], dict[str, object]]] = {
    "depth 0": lambda _: {"depth": 0},
    "auto": lambda n: {"draft_ids": right(n)},
    "right drafts": lambda n: {"draft_ids": right(n), "depth": 3, "sources": BLOCK},
    "wrong drafts": lambda n: {"draft_ids": right(n + 1), "depth": 4, "sources": BLOCK},
    "deeper than the core": lambda n: {"draft_ids": right(n), "depth": 16, "sources": BLOCK},
    "half a draft": lambda n: {"draft_ids": right(n)[:9], "depth": 4, "sources": BLOCK},
}


@pytest.mark.parametrize("way", WAYS)
def test_outputs_do_not_depend_on_drafts(way: str) -> None:
    done = Made().run([request(n, **WAYS[way](n)) for n in range(9)])
    assert [done[f"r{n}"].token_ids for n in range(9)] == [right(n) for n in range(9)]
    assert {c.finish_reason for c in done.values()} == {FinishReason.LENGTH}


def test_right_drafts_are_accepted_and_each_token_says_where_it_came_from() -> None:
    made = Made()
    done = made.run([request(0, draft_ids=right(0), depth=4, sources=BLOCK)])["r0"]
    assert done.proposed == done.accepted == 18  # 1 alone, then 4 and 1 behind them, at the end 3
    assert done.origins.count(Origin.ACCEPTED) == done.accepted
    assert done.origins[0] == Origin.PLAIN
    assert sum(done.provenance.drafted) == done.proposed
    assert done.provenance.sources == (PRE_GENERATED,)
    assert made.engine.stats.accepted == made.engine.stats.proposed == 18
    assert len(done.logprobs) == len(done.origins) == TOKENS


def test_drafts_of_the_core_itself_are_one_more_proposer() -> None:
    done = Made(own=[]).run([request(0, depth=4, sources=frozenset({"draft-model"}))])["r0"]
    assert done.token_ids == right(0)
    assert done.proposed == done.accepted == 18
    assert done.provenance.sources == ("draft-model@eagle3",)


def test_drafts_of_the_core_itself_are_verified_no_further_than_is_chosen() -> None:
    made = Made(own=[])
    requests = [request(0, depth=2, sources=frozenset({"draft-model"})), request(1, sources=BLOCK)]
    done = made.run([*requests, request(2, depth=0)])
    assert [done[f"r{n}"].token_ids for n in range(3)] == [right(n) for n in range(3)]
    assert max(done["r0"].provenance.drafted) == 2
    assert done["r1"].proposed == done["r2"].proposed == 0


def test_wrong_drafts_are_counted_and_the_token_in_their_place_is_corrected() -> None:
    done = Made().run([request(0, draft_ids=(11,) * 40, depth=2, sources=BLOCK)])["r0"]
    assert done.accepted == 0 < done.proposed
    assert Origin.CORRECTED in done.origins
    assert set(done.provenance.rejected) == {11}


def test_a_stop_token_inside_a_draft_ends_the_output() -> None:
    stop = right(0)[7]
    at = right(0).index(stop)
    params = replace(GREEDY, stop_token_ids=(stop,))
    for depth in (0, 1, 2, 3, 4):
        draft = {"draft_ids": right(0), "sources": BLOCK} if depth else {}
        done = Made().run([request(0, params, depth=depth, **draft)])["r0"]
        assert done.token_ids == right(0)[: at + 1]
        assert done.finish_reason is FinishReason.STOP
        assert done.proposed >= done.accepted
        assert len(done.origins) == at + 1


def test_a_stop_string_ends_the_output_and_leaves_the_core() -> None:
    def watch() -> Callable[[int], bool]:
        return lambda token: token == right(0)[5]

    params = replace(GREEDY, stop=("x",))
    made = Made()
    done = made.run([request(0, params, watch_text=watch), request(1)])
    assert done["r0"].token_ids == right(0)[: right(0).index(right(0)[5]) + 1]
    assert done["r0"].finish_reason is FinishReason.STOP
    assert done["r1"].token_ids == right(1)


def test_an_output_is_continued_where_it_was() -> None:
    done = Made().run([request(0, decided_ids=right(0)[:5], params=replace(GREEDY, min_tokens=9))])
    assert len(done["r0"].token_ids) == TOKENS - 5


def test_what_cannot_run_is_refused_alone() -> None:
    bad = {
        "words": replace(GREEDY, bad_words=((11,),)),
        "ids": replace(GREEDY, bad_token_ids=(11,)),
        "tops": replace(GREEDY, top_logprobs=21),
        "refused by the core": replace(GREEDY, top_logprobs=6),
    }
    given = [replace(request(0, params), request_id=name) for name, params in bad.items()]
    given += [
        replace(request(1), request_id="long", prompt_ids=prompt_of(1, CONTEXT)),
        replace(request(1), request_id="outside", prompt_ids=(VOCABULARY,)),
        replace(request(1), request_id="empty", prompt_ids=()),
        request(2),
    ]
    done = Made().run(given)
    assert len(done) == len(given)
    assert done["r2"].token_ids == right(2)
    for completion in done.values():
        assert (completion.error is None) == (completion.request_id == "r2")
    assert "does not fit the context of 200" in (done["long"].error or "")
    assert "bad_words" in (done["words"].error or "")


def test_running_and_waiting_requests_are_cancelled() -> None:
    made = Made()
    for n in range(6):
        made.engine.add(request(n))
    made.engine.step()
    assert made.engine.unstarted() == ["r4", "r5"]
    dropped = made.engine.cancel(lambda r: r.request_id in ("r1", "r5"))
    assert [c.finish_reason for c in dropped] == [FinishReason.CANCELLED] * 2
    assert sorted(made.finish(dropped)) == ["r0", "r2", "r3", "r4"]


def test_greedy_and_sampled_requests_run_apart_where_they_must() -> None:
    mixed = [request(n, SAMPLED if n % 2 else GREEDY) for n in range(12)]
    apart = Made(APART)
    assert len(apart.run(mixed)) == 12
    kinds = [{bool(w.params.temperature) for w in b} for core in apart.cores for b in core.batches]
    assert all(len(kind) <= 1 for kind in kinds)
    together = Made(SOUND)
    together.run(mixed)
    assert any(
        len({bool(w.params.temperature) for w in batch}) == 2 for batch in together.cores[0].batches
    )


def test_what_vllm_cannot_draft_for_has_a_core_without_speculation() -> None:
    made = Made()
    done = made.run([
        request(0, draft_ids=right(0)),
        request(1, replace(SAMPLED, min_p=0.1)),
        request(2, replace(GREEDY, logit_bias=((11, 1.0),))),
        request(3, depth=0),
        request(4),
    ])  # fmt: skip
    assert len(done) == 5
    assert [bool(core.options.max_depth) for core in made.cores] == [True, False]
    assert [core.closed for core in made.cores] == [True, False]
    assert {w.request_id for b in made.cores[0].batches for w in b} == {"r0", "r3", "r4"}


def test_a_job_that_never_drafts_has_a_core_without_speculation() -> None:
    made = Made(APART)
    done = made.run([request(0, depth=0), request(1, SAMPLED, depth=0)])
    assert [core.options.max_depth for core in made.cores] == [0]
    assert max(len(batch) for batch in made.cores[0].batches) == 2  # the fault is of drafts
    assert done["r0"].token_ids == right(0)


def test_it_stays_in_a_core_that_others_need_for_drafts() -> None:
    made = Made()
    made.engine.add(request(0, depth=0))
    made.engine.step()
    made.engine.add(request(1, draft_ids=right(1), depth=4))
    made.engine.add(request(2, depth=0))
    done = made.finish()
    assert [core.options.max_depth for core in made.cores] == [0, 4]
    assert {w.request_id for b in made.cores[0].batches for w in b} == {"r0", "r2"}
    made.engine.add(request(3, depth=0))
    made.finish(list(done.values()))
    assert len(made.cores) == 2


def test_sampled_requests_have_a_plain_core_where_drafts_would_change_them() -> None:
    made = Made(Verdict(True, False, False, True), faulty="sampled")
    given = [request(n, SAMPLED if n % 2 else GREEDY, draft_ids=right(n), depth=4, sources=BLOCK)
             for n in range(8)]  # fmt: skip
    done = made.run(given)
    assert [done[f"r{n}"].token_ids for n in range(8)] == [right(n) for n in range(8)]
    assert [core.options.max_depth for core in made.cores] == [4, 0]
    assert all(w.params.temperature for b in made.cores[1].batches for w in b)
    assert {n for n in range(8) if done[f"r{n}"].accepted} == {0, 2, 4, 6}


def test_nothing_is_drafted_where_the_probe_found_a_fault() -> None:
    made = Made(OFF)
    done = made.run([request(0, draft_ids=right(0), depth=4)])["r0"]
    assert done.proposed == 0
    assert [core.options.max_depth for core in made.cores] == [4, 0]
    assert made.cores[0].steps == 0


def test_nobody_waits_for_ever_behind_another_kind() -> None:
    made = Made(APART)
    made.engine.add(request(0))
    made.engine.step()
    made.engine.add(request(1, SAMPLED))
    for n in range(2, 200):
        made.engine.add(request(n))
    done: list[str] = []
    while "r1" not in done:
        done += [c.request_id for c in made.engine.step()]
    assert len(done) <= 4 * (PASSED_OVER + 2)


def test_a_preempted_request_keeps_its_output() -> None:
    made = Made()
    given = [request(n, draft_ids=right(n), depth=3, sources=BLOCK) for n in range(3)]
    for one in given:
        made.engine.add(one)
    done = {c.request_id: c for c in made.engine.step()}
    made.cores[0].preempt = {4: "r1", 6: "r2"}
    done |= made.finish()
    assert [done[f"r{n}"].token_ids for n in range(3)] == [right(n) for n in range(3)]
    assert made.engine.stats.preemptions == 2


@pytest.mark.parametrize("most", [0, 1, 2])
def test_drafts_that_found_no_room_are_not_counted(most: int) -> None:
    made = Made()
    for n in range(3):
        made.engine.add(request(n, draft_ids=right(n), depth=4, sources=BLOCK))
    made.engine.step()
    made.cores[0].most_drafted = most
    done = made.finish()
    assert [done[f"r{n}"].token_ids for n in range(3)] == [right(n) for n in range(3)]
    for completion in done.values():
        assert completion.accepted == completion.proposed == sum(completion.provenance.drafted)
        assert (completion.proposed > 0) == (most > 0)
        assert Origin.CORRECTED not in completion.origins


def test_nan_fails_one_request_alone() -> None:
    made = Made()
    for n in range(3):
        made.engine.add(request(n))
    made.engine.step()
    made.cores[0].nan = {"r1"}
    done = made.finish()
    assert "NaN" in (done["r1"].error or "")
    assert done["r2"].token_ids == right(2)
    assert made.cores[0].dropped_caches == 1  # they may hold the KV that gave NaN


def test_a_request_that_the_core_ends_without_a_token_fails() -> None:
    made = Made()
    for n in range(2):
        made.engine.add(request(n))
    made.engine.step()
    made.cores[0].ended = {"r1"}
    done = made.finish()
    assert done["r1"].error == "vLLM ended the request before its end"
    assert done["r0"].token_ids == right(0)


def test_a_least_number_of_tokens_ends_with_the_context() -> None:
    params = SamplingParams(max_tokens=CONTEXT, min_tokens=CONTEXT)
    made = Made()
    done = made.run([Request("r0", prompt_of(0, CONTEXT - 5), params, seed=0)])["r0"]
    assert done.finish_reason == FinishReason.LENGTH
    assert len(done.token_ids) == 5
    assert made.cores[0].batches[0][0].params.min_tokens == 5


def test_prompt_tokens_whose_kv_was_there_are_not_charged() -> None:
    made = Made(chunk=64)
    for n in range(2):
        made.engine.add(request(n, depth=0, params=replace(GREEDY, max_tokens=1)))
    made.engine.prepare()
    made.cores[0].cached = {"r0": 11}  # of 12
    done = made.finish()
    assert made.engine.stats.reused_tokens == 11
    shares = [sum(astuple(done[f"r{n}"].ticks)) for n in range(2)]
    assert shares[0] * 6 < shares[1]


def test_a_prompt_in_chunks_is_charged_by_the_chunk() -> None:
    made = Made(chunk=4)
    for n in range(2):
        made.engine.add(request(n, depth=0, params=replace(GREEDY, max_tokens=1)))
    made.engine.prepare()
    made.cores[0].cached = {"r0": 11}  # they were part of the first chunk
    done = made.finish()
    shares = [sum(astuple(done[f"r{n}"].ticks)) for n in range(2)]
    assert abs(shares[0] - shares[1]) <= 2 * made.cores[0].steps


def test_drafts_that_cannot_even_be_tried_cost_no_job() -> None:
    cores: list[FakeCore] = []

    def make(drafted: bool) -> FakeCore:
        if drafted:
            raise ModelError("vLLM cannot serve model `x` with speculation")
        cores.append(FakeCore(drafted))
        return cores[-1]

    engine = VllmEngine(make, lambda _: SOUND, VOCABULARY, frozenset(), 4)  # type: ignore[arg-type]  # cores without vLLM
    for n in range(2):
        engine.add(request(n))
    done = {}
    while not engine.idle:
        done |= {c.request_id: c.token_ids for c in engine.step()}
    assert done == {f"r{n}": right(n) for n in range(2)}
    assert len(cores) == 1
    assert engine.verdict is not None
    assert "with speculation" in engine.verdict.in_words


def test_what_could_not_be_tried_is_tried_a_second_time_and_no_third() -> None:
    tries = [NoEngineError("out of memory"), None]
    cores: list[FakeCore] = []

    def make(drafted: bool) -> FakeCore:
        if drafted and (error := tries.pop(0)) is not None:
            raise error
        cores.append(FakeCore(drafted))
        return cores[-1]

    def run(numbers: Sequence[int]) -> list[int]:
        for n in numbers:
            engine.add(request(n, draft_ids=right(n), depth=4, sources=BLOCK))
        proposed = []
        while not engine.idle:
            engine.prepare()
            proposed += [c.proposed for c in engine.step()]
        return proposed

    engine = VllmEngine(make, lambda _: SOUND, VOCABULARY, frozenset(), 4)  # type: ignore[arg-type]  # cores without vLLM
    assert run([0, 1]) == [0, 0]
    assert engine.verdict is not None
    assert "will be tried once more" in engine.verdict.in_words
    assert min(run([2, 3])) > 0
    assert engine.verdict == SOUND

    tries, cores = [NoEngineError("out of memory")] * 2, []
    engine = VllmEngine(make, lambda _: SOUND, VOCABULARY, frozenset(), 4)  # type: ignore[arg-type]  # cores without vLLM
    for numbers in ([0], [1], [2]):
        assert run(numbers) == [0]
    assert not tries
    assert "more" not in engine.verdict.in_words if engine.verdict else False


def test_loading_is_no_step() -> None:
    loading, loaded = threading.Event(), threading.Event()

    def make(drafted: bool) -> FakeCore:
        loading.set()
        assert loaded.wait(60)
        return FakeCore(drafted)

    engine = VllmEngine(make, lambda _: SOUND, VOCABULARY, frozenset(), 4)  # type: ignore[arg-type]  # cores without vLLM
    service = EngineService(lambda: engine)
    try:
        ticket = service.submit("job", [request(0)])
        assert loading.wait(60)
        assert service.stepping_since is None
        assert service.loading_since is not None
        service.stop()
        with pytest.raises(RequestCancelledError):
            ticket.wait(60)
    finally:
        loaded.set()
        service.close()


def test_a_step_that_fails_beside_a_recheck_is_known() -> None:
    made = Made(one_in=1)
    made.engine.add(request(0))
    made.engine.prepare()
    made.cores[0].raises = {TOKENS + 2: RuntimeError("out of memory")}
    with pytest.raises(RuntimeError, match="out of memory"):
        made.finish()
    assert made.engine.failed_rechecking
    assert Made(one_in=0).run([request(0)])["r0"].recheck == NOT_LOOKED_AT


def test_without_speculation_nobody_is_asked_for_drafts() -> None:
    made = Made(OFF)
    done = made.run([request(n, draft_ids=right(n)) for n in range(3)])
    assert [done[f"r{n}"].token_ids for n in range(3)] == [right(n) for n in range(3)]
    assert all(c.provenance.sources == () for c in done.values())
    assert made.engine.stats.proposed == 0


def test_a_hint_is_followed() -> None:
    made = Made()
    made.engine.add(request(0, depth=4, sources=BLOCK))
    made.engine.step()
    made.engine.hint("r0", 0, right(0))
    made.engine.hint("nobody", 0, right(0))
    done = made.finish()["r0"]
    assert done.token_ids == right(0)
    assert done.accepted > 0
    assert made.engine.stats.hints_followed == 1


def test_a_step_that_raises_closes_the_core() -> None:
    made = Made()
    made.engine.add(request(0))
    made.engine.step()
    made.cores[0].raises = {2: RuntimeError("out of memory")}
    with pytest.raises(RuntimeError, match="out of memory"):
        made.engine.step()
    assert made.cores[0].closed


def test_behind_its_service_a_failed_step_fails_its_requests_and_the_next_go_on() -> None:
    engines: list[Made] = []

    def make() -> VllmEngine:
        engines.append(Made())
        if len(engines) == 1:
            of = engines[0]
            core = FakeCore()
            core.raises = {3: RuntimeError("broken")}
            of.engine._core = core  # type: ignore[assignment]  # a core without vLLM
        return engines[-1].engine

    service = EngineService(make)
    try:
        with pytest.raises(EngineError, match="broken"):
            service.submit("job", [request(0)]).wait(30)
        (done,) = service.submit("job", [request(1)]).wait(30)
        assert done.token_ids == right(1)
        assert len(engines) == 2
    finally:
        service.close()


def test_a_model_that_vllm_refuses_fails_as_such_and_is_tried_anew() -> None:
    refused = [ModelError("vLLM cannot serve model `x`"), EngineError("busy"), None]

    def make(drafted: bool) -> FakeCore:
        if error := refused.pop(0):
            raise error
        return FakeCore(drafted)

    def engine() -> VllmEngine:
        return VllmEngine(
            lambda d: made(lambda: make(d)), lambda _: SOUND, VOCABULARY, frozenset(), 4
        )  # type: ignore[arg-type, return-value]  # cores without vLLM

    service = EngineService(engine)
    try:
        with pytest.raises(ModelError, match="cannot serve model"):
            service.submit("job", [request(0, depth=0)]).wait(60)
        with pytest.raises(NoEngineError, match="busy"):
            service.submit("job", [request(0, depth=0)]).wait(60)
        (done,) = service.submit("job", [request(0, depth=0)]).wait(60)
        assert done.token_ids == right(0)
        assert service.stats.finished == 1
    finally:
        service.close()


class Heard:
    """An observer that counts."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self.counts.update([name])


def test_an_observer_hears_of_steps_and_requests() -> None:
    heard, core = Heard(), FakeCore()
    engine = VllmEngine(lambda _: core, lambda _: SOUND, VOCABULARY, frozenset(), 4, None, heard)  # type: ignore[arg-type, return-value]  # a core without vLLM, an observer without methods
    for n in range(3):
        engine.add(request(n, draft_ids=right(n), depth=3))
    while not engine.idle:
        engine.step()
    assert heard.counts["stepped"] == engine.stats.steps == core.steps
    assert heard.counts["first_token"] == heard.counts["finished"] == 3
    assert engine.stats.kv_blocks == (0, 64, 0)


# --- recheck --------------------------------------------------------------------------------------
def test_finished_outputs_are_fed_again_and_agree() -> None:
    made = Made(one_in=1)
    done = made.run([request(n, draft_ids=right(n), depth=3) for n in range(6)])
    assert [done[f"r{n}"].token_ids for n in range(6)] == [right(n) for n in range(6)]
    assert {c.recheck for c in done.values()} == {Recheck(TOKENS, 0, 0.0)}
    assert made.engine.stats.checked_tokens == 6 * TOKENS
    assert made.engine.stats.finished == 6


def test_a_recheck_finds_tokens_that_the_model_does_not_decide() -> None:
    made = Made(one_in=1, faulty="drafts")
    done = made.run([request(0, draft_ids=right(0), depth=3, sources=BLOCK), request(1, depth=0)])
    assert done["r0"].recheck.tokens == TOKENS
    assert done["r0"].recheck.differing == made.engine.stats.differing_tokens > 0
    assert done["r0"].recheck.largest_margin == made.engine.stats.largest_margin == 2.5
    assert done["r1"].recheck == Recheck(TOKENS, 0, 0.0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"params": SAMPLED}, "drawn"),
        ({"params": replace(GREEDY, repetition_penalty=1.2)}, "other logits"),
        ({"params": replace(GREEDY, min_tokens=3)}, "stop tokens were masked"),
        ({"decided_ids": right(0)[:4]}, "another engine decided some"),
        ({"prompt_ids": prompt_of(0, CONTEXT - 4)}, "it fills the context"),
    ],
)
def test_only_plainly_greedy_outputs_are_fed_again(changes: dict[str, object], why: str) -> None:
    done = Made(one_in=1).run([request(0, **changes)])["r0"]
    assert done.error is None, why
    assert done.recheck == Recheck(), why


def test_a_request_that_is_cancelled_in_its_recheck_ends_once() -> None:
    made = Made(one_in=1)
    made.engine.add(request(0, replace(GREEDY, max_tokens=3), draft_ids=right(0)))
    while made.engine.stats.generated_tokens < 3:
        assert made.engine.step() == []
    dropped = made.engine.cancel(lambda r: r.request_id == "r0")
    assert [c.request_id for c in dropped] == ["r0"]
    assert made.engine.idle


# --- switched off by an operator ----------------------------------------------------------------


@pytest.mark.parametrize("own", [None, []], ids=["our drafts", "the core's"])
def test_drafts_that_are_switched_off_end_with_the_next_step(own: list[int] | None) -> None:
    made, sources = Made(own=own), BLOCK if own is None else frozenset({"draft-model"})
    off = DraftSwitches((DraftSwitch(SwitchScope(tag="de"), 1.0, "alice", "it is slow"),))
    for n, tag in enumerate(("de", "fr")):
        more = {"depth": 2, "sources": sources, "scope": RowScope("", "", tag)}
        made.engine.add(request(n, draft_ids=right(n), **more))
    for _ in range(5):
        made.engine.step()
    before = {s.request.scope.tag: s.proposed for s in made.engine.unfinished}
    assert min(before.values()) > 0
    made.engine.switch(off)
    for _ in range(3):
        made.engine.step()
    after = {s.request.scope.tag: s.proposed for s in made.engine.unfinished}
    assert after["de"] == before["de"]
    assert after["fr"] > before["fr"]
    made.engine.switch(ALL_ON)
    made.engine.step()
    assert {s.request.scope.tag: s.proposed for s in made.engine.unfinished}["de"] > after["de"]
    done = made.finish()
    assert done["r0"].token_ids == right(0)
    assert done["r1"].token_ids == right(1)


# --- grammars -------------------------------------------------------------------------------------
def formed(number: int, **more: object) -> Request:
    return request(number, grammar=Thirds(VOCABULARY), **more)


def is_formed(tokens: Sequence[int]) -> bool:
    state = Thirds(VOCABULARY).begin()
    for token in tokens:
        state.append(token)  # raises where it does not fit
    return True


def test_outputs_have_their_grammar_whatever_is_drafted() -> None:
    truth = Made().run([formed(n, depth=0) for n in range(6)])
    assert all(is_formed(c.token_ids) for c in truth.values())
    assert len({c.token_ids for c in truth.values()}) == 6
    for depth, shift in ((4, 0), (2, 1), (None, 0)):
        drafts = [truth[f"r{(n + shift) % 6}"].token_ids for n in range(6)]
        made = Made()
        done = made.run([formed(n, depth=depth, draft_ids=drafts[n]) for n in range(6)])
        assert {r: c.token_ids for r, c in done.items()} == {
            r: c.token_ids for r, c in truth.items()
        }
        assert (made.engine.stats.accepted > 0) == (shift == 0)


def test_an_output_with_a_grammar_is_continued_in_it() -> None:
    whole = Made().run([formed(0, depth=0)])["r0"].token_ids
    done = Made().run([formed(0, decided_ids=whole[:5])])["r0"]
    assert done.token_ids == whole[5:]


def test_requests_with_a_grammar_have_a_plain_core_where_drafts_would_take_it_off() -> None:
    made = Made(Verdict(True, True, True, False), faulty="formed")
    given = [formed(n, depth=4) if n % 2 else request(n, draft_ids=right(n), depth=4, sources=BLOCK)
             for n in range(6)]  # fmt: skip
    done = made.run(given)
    assert [core.options.max_depth for core in made.cores] == [4, 0]
    assert all(is_formed(done[f"r{n}"].token_ids) for n in (1, 3, 5))
    assert {n for n in range(6) if done[f"r{n}"].accepted} == {0, 2, 4}


def test_an_output_that_leaves_its_grammar_ends_alone() -> None:
    made = Made(faulty="formed")  # a fault that the probe has missed
    given = [formed(0, draft_ids=right(0), depth=4, sources=BLOCK), request(1)]
    done = made.run(given)
    assert done["r0"].error is not None
    assert done["r1"].token_ids == right(1)


def test_outputs_with_a_grammar_are_not_fed_again() -> None:
    done = Made(one_in=1).run([formed(0, depth=0)])["r0"]
    assert done.recheck == Recheck()
