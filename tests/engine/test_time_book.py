"""Every tick of a step is some sequence's, whatever raises, is tried apart or looked at again."""

from __future__ import annotations

import random

import pytest
from engine.decoding import Bench, bench, prompts, runner_of
from engine.faulty import real_tokens, spoil
from engine.test_engine_errors import poisoned, requests

from specbatch.kernels.decoder.contract import DecoderBatch
from specbatch.pipeline.engines.clock import now
from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.exact.recheck import Rechecker
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.engines.state.accounting import (
    DRAFT,
    OVERHEAD,
    PADDING,
    PREFILL,
    REJECTED,
    VERIFY,
    Pass,
    TimeBook,
    spread,
)
from specbatch.pipeline.engines.state.sequence import Sequence
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


def random_pass(chance: random.Random, first: int) -> Pass:
    """Of some sequences, some of which decided a token in it."""
    sequences = [
        Sequence(Request(f"r{first + n}", (1,), GREEDY, seed=0), frozenset(), 20)
        for n in range(chance.randint(1, 5))
    ]
    rows = [(chance.randint(0, 40), 1, chance.randint(0, 4)) for _ in sequences]
    for sequence in sequences:
        sequence.passes = chance.randint(0, 1)
    weights = [chance.choice([0, 1, 5]) for _ in sequences]
    return Pass(sequences, rows, weights, chance.randint(1, 50_000))


@pytest.mark.parametrize("seed", range(40))
def test_every_tick_of_a_step_is_some_sequences_by_its_rows_and_drafts(seed: int) -> None:
    chance, totals = random.Random(seed), [0] * 6
    passes = [random_pass(chance, 100 * n) for n in range(chance.randint(1, 3))]
    width = chance.choice([1, 16])

    def padded(rows: int) -> int:
        return -(-rows // width) * width

    passing = sum(each.ticks for each in passes)
    drafting = chance.choice([0, 12_345, 10**12])  # the last is more than there was
    begun = now() - passing - 100_000
    whole, shares = TimeBook(totals).share_step(begun, drafting, passes, 7, padded)
    time = {sequence.request.request_id: Ticks(*sequence.time)
            for each in passes for sequence in each.sequences}  # fmt: skip
    assert sum(time.values(), start=NO_TICKS) == Ticks(*totals)
    assert Ticks(*totals).total == whole >= passing + 100_000
    assert totals[DRAFT] == min(drafting, whole - passing)
    assert totals[OVERHEAD] == whole - passing - totals[DRAFT]
    sizes = [sum(map(sum, each.rows)) for each in passes]
    assert totals[PADDING] == sum(
        each.ticks - each.ticks * size // padded(size)
        for each, size in zip(passes, sizes, strict=True)
    )
    for each, size in zip(passes, sizes, strict=True):
        drafts = sum(sequence.time[DRAFT] for sequence in each.sequences)
        assert drafts == pytest.approx(totals[DRAFT] * size / sum(sizes), abs=1)
        useful = each.ticks * size // padded(size)
        for sequence, of_kinds, weight in zip(
            each.sequences, each.rows, each.draft_weights, strict=True
        ):
            for kind, count in zip((PREFILL, VERIFY, REJECTED), of_kinds, strict=True):
                assert sequence.time[kind] == pytest.approx(useful * count / size, abs=1)
            share = weight / sum(each.draft_weights) if any(each.draft_weights) else None
            if share is not None:
                assert sequence.time[DRAFT] == pytest.approx(drafts * share, abs=1)
            decided = bool(sequence.passes)
            assert sequence.steps == [7] * decided
            assert sequence.pass_ticks == [sum(sequence.time)] * decided
    assert shares == [sum(sequence.time) for sequence in passes[-1].sequences]


def test_a_step_that_decides_nothing_more_adds_no_pass() -> None:
    one = random_pass(random.Random(1), 0)
    for sequence in one.sequences:
        sequence.passes = 1
    book = TimeBook([0] * 6)
    for number in (3, 4):
        book.share_step(now() - 10**6, 0, [one], number, lambda rows: rows)
    assert all(list(sequence.steps) == [3] for sequence in one.sequences)
    assert all(len(sequence.pass_ticks) == 1 for sequence in one.sequences)
    assert all(sequence.time[DRAFT] == 0 for sequence in one.sequences)


def test_what_is_done_for_one_alone_is_charged_to_it() -> None:
    totals = [0] * 6
    book, sequence = TimeBook(totals), random_pass(random.Random(1), 0).sequences[0]
    for kind in (PREFILL, OVERHEAD, OVERHEAD):
        book.add(sequence, kind, 50)
    assert Ticks(*sequence.time) == Ticks(*totals) == Ticks(prefill=50, overhead=100)


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
