"""Every tick of a step is some sequence's, whatever raises, is tried apart or looked at again."""

from __future__ import annotations

import random

import pytest
from engine.decoding import Bench, bench, prompts, runner_of
from engine.faulty import real_tokens, spoil
from engine.test_engine_errors import poisoned, requests

from specbatch.kernels.decoder.contract import DecoderBatch
from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.exact.recheck import Rechecker
from specbatch.pipeline.engines.exact.state.accounting import TimeBook, spread
from specbatch.pipeline.engines.exact.state.sequence import Sequence
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.schemas.provenance import NO_TICKS, TICKS_PER_SEC, Ticks
from specbatch.schemas.records import FinishReason, Origin, SamplingParams
from support.engines import loaded
from support.models import TinyPair

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def sum_of(done: list[Completion]) -> Ticks:
    return sum((c.ticks for c in done), start=NO_TICKS)


def finish(one: Bench) -> list[Completion]:
    """Step by step to the end; after each the books balance."""
    while not one.engine.idle:
        one.step()
        spent = [Ticks(*s.time) for s in one.engine.unfinished]
        spent += [c.ticks for c in one.finished.values()]
        assert sum(spent, start=NO_TICKS) == one.engine.stats.ticks
    assert one.engine.stats.busy_sec == pytest.approx(one.engine.stats.ticks.total / TICKS_PER_SEC)
    return list(one.finished.values())


def test_parts_add_up_and_are_right_to_one() -> None:
    chance = random.Random(3)
    for _ in range(200):
        weights = [chance.choice([0, 1, 7, 300]) for _ in range(chance.randint(1, 20))]
        total = chance.choice([0, 1, 13, 10**12])
        parts = spread(total, weights)
        assert sum(parts) == total
        if whole := sum(weights):
            pairs = zip(parts, weights, strict=True)
            assert all(abs(p - total * w / whole) < 1 + 1e-12 * total for p, w in pairs)


def test_a_pass_is_shared_by_what_became_of_its_rows() -> None:
    totals = [0] * 6
    one, other = (
        Sequence(Request(name, (1,), GREEDY, seed=0), frozenset(), 20) for name in ("a", "b")
    )
    rows = [(10, 1, 0), (0, 3, 2)]
    shares = TimeBook(totals).share_pass(
        [one, other], rows, ticks=3200, overhead=160, padded=lambda _: 32, drafts=[0, 50]
    )
    assert Ticks(*one.time) == Ticks(prefill=1000, verify=100, padding=1100, overhead=110)
    assert Ticks(*other.time) == Ticks(verify=300, draft=50, rejected=200, padding=500, overhead=50)
    assert shares == [2310, 1100]
    assert Ticks(*totals) == Ticks(*one.time) + Ticks(*other.time)


@pytest.mark.parametrize("depth", [0, 4], ids=lambda depth: f"depth-{depth}")
def test_kinds_of_time_follow_what_was_done(tiny_pair: TinyPair, depth: int) -> None:
    one = bench(tiny_pair.verifier, tiny_pair.draft).add(*requests(8, depth))
    for done in finish(one):
        ticks = done.ticks
        assert min(ticks.verify, ticks.overhead) > 0
        assert bool(ticks.draft) == bool(done.proposed) == bool(depth)
        assert bool(ticks.rejected) == (done.proposed > done.accepted)
        assert done.compute_sec == ticks.total / TICKS_PER_SEC
        assert 0 < sum(done.provenance.pass_ticks) <= ticks.total


def test_rows_that_fill_a_tile_are_padding(tiny_pair: TinyPair) -> None:
    one = bench(tiny_pair.verifier, native=False).add(*requests(3, 0))
    done = finish(one)
    assert sum_of(done).padding > 0


@pytest.mark.parametrize("depth", [0, 4], ids=lambda depth: f"depth-{depth}")
def test_passes_that_raise_are_overhead_of_all_who_were_in_them(
    tiny_pair: TinyPair, depth: int
) -> None:
    bad = (3, 4, 11)
    one = bench(tiny_pair.verifier, tiny_pair.draft)
    spoil(one, poisoned)
    done = {c.request_id: c for c in finish(one.add(*requests(20, depth, bad)))}
    for i in bad:
        ticks = done[str(i)].ticks
        assert ticks.overhead > 0
        assert (ticks.verify, ticks.prefill, ticks.rejected) == (0, 0, 0), (
            "its pass came to nothing"
        )
        assert done[str(i)].provenance.steps == ()


def test_memory_that_runs_out_is_overhead(tiny_pair: TinyPair) -> None:
    def too_much(batch: DecoderBatch) -> Exception | None:
        return MemoryError("none left") if real_tokens(batch) > 40 else None

    one = bench(tiny_pair.verifier, tiny_pair.draft)
    spoil(one, too_much)
    finish(one.add(*requests(20, 4)))
    assert one.engine.stats.raised_passes > 0


def test_a_text_watch_that_raises_keeps_its_pass(tiny_pair: TinyPair) -> None:
    def watch(_: int) -> bool:
        raise ValueError("no such text")

    params = SamplingParams(max_tokens=12, stop=("x",))
    asked = Request("a", prompts(1)[0], params, seed=1, watch_text=lambda: watch)
    (done,) = finish(bench(tiny_pair.verifier).add(asked))
    assert done.finish_reason is FinishReason.ERROR
    assert (
        len(done.provenance.steps) == len(done.provenance.pass_ticks) == done.verifier_passes == 1
    )


def test_a_second_look_is_overhead_of_whom_it_is_at(tiny_pair: TinyPair) -> None:
    runner = runner_of(loaded(tiny_pair.verifier, "float32"), 256)
    times = []
    for rechecker in (None, Rechecker(runner, 1)):
        engine = Engine(runner, rechecker=rechecker)
        for i, prompt in enumerate(prompts(6)):
            engine.add(Request(str(i), prompt, GREEDY, seed=i))
        done: list[Completion] = []
        while not engine.idle:
            done += engine.step()
        assert sum_of(done) == engine.stats.ticks
        times.append(engine)
    looked = times[1].stats
    assert looked.checked_tokens > 0
    assert looked.ticks.total > looked.busy_sec * TICKS_PER_SEC + 1, "a look is no part of a step"


def test_exactness_fast_balances_too(tiny_pair: TinyPair) -> None:
    model = load_model(inspect_model(str(tiny_pair.verifier)), "float32", "fast", native=False)
    engine = Engine(runner_of(model, 256))
    for i, prompt in enumerate(prompts(5)):
        engine.add(Request(str(i), prompt, GREEDY, seed=i, depth=0))
    done: list[Completion] = []
    while not engine.idle:
        done += engine.step()
    assert sum_of(done) == engine.stats.ticks
    assert {origin for c in done for origin in c.origins} == {Origin.PLAIN}
