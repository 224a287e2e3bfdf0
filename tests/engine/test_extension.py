"""A block may be gone on with while its sequence is decoded: late, doubled, wrong, or never."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from engine.decoding import Bench, assert_same, baseline_of, bench, prompts

from specbatch.pipeline.engines.contract import Completion, Request, Wanted
from specbatch.pipeline.engines.proposers.block import (
    ASK_AGAIN_AFTER,
    LOST_FOR,
    LOW_WATER,
    WANTED_AT_ONCE,
    BlockProposer,
)
from specbatch.pipeline.engines.service import EngineService
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.schemas.records import FinishReason, SamplingParams
from support.models import TinyPair

SAMPLED = SamplingParams(max_tokens=90, temperature=0.8, ignore_eos=True)
PATIENCE_SEC = 60.0


def sequence_with(block: Iterable[int], name: str = "r", length: int = 500) -> Sequence:
    params = SamplingParams(max_tokens=length)
    request = Request(name, (1, 2, 3), params, seed=1, draft_ids=tuple(block))
    return Sequence(request, frozenset(), max_length=3 + length)


def decide(proposer: BlockProposer, sequence: Sequence, tokens: Iterable[int]) -> None:
    """One token a step, drafted for where there is something to draft."""
    for token in tokens:
        if proposer.available(sequence):
            proposer.propose([sequence], [1])
        sequence.accept([], [token], [0.0])
    proposer.available(sequence)


def draft(proposer: BlockProposer, sequence: Sequence) -> list[int]:
    return proposer.propose([sequence], [3])[0] if proposer.available(sequence) else []


# --- the proposer ---------------------------------------------------------------------------
def test_a_late_extension_leads_on_from_where_the_sequence_is_by_then() -> None:
    proposer, sequence = BlockProposer(), sequence_with(range(10))
    decide(proposer, sequence, range(16))  # it ran out of its block at 10, and went on
    assert draft(proposer, sequence) == []
    assert proposer.extend(sequence, 5, list(range(5, 40)))
    assert draft(proposer, sequence) == [16, 17, 18]


def test_a_late_extension_is_realigned() -> None:
    proposer, sequence = BlockProposer(), sequence_with(range(10))
    decide(proposer, sequence, [*range(12), 99, *range(13, 20)])
    assert proposer.extend(sequence, 8, list(range(8, 40)))  # it has 12 where 99 was decided
    assert draft(proposer, sequence) == [20, 21, 22]


def test_an_extension_that_comes_too_late_or_leads_nowhere_is_dropped() -> None:
    proposer, sequence = BlockProposer(), sequence_with(range(30))
    decide(proposer, sequence, range(20))
    assert not proposer.extend(sequence, 5, list(range(5, 18)))  # all of it is past
    assert not proposer.extend(sequence, 5, [77] * 100)
    assert not proposer.extend(sequence, 21, list(range(21, 90)))  # from the future
    assert not proposer.extend(sequence, -1, list(range(90)))
    assert draft(proposer, sequence) == [20, 21, 22]  # the first block is still followed


def test_the_same_extension_twice_changes_nothing() -> None:
    proposer, sequence = BlockProposer(), sequence_with(range(10))
    decide(proposer, sequence, range(12))
    assert proposer.extend(sequence, 8, list(range(8, 40)))
    assert not proposer.extend(sequence, 8, list(range(8, 40)))
    assert draft(proposer, sequence) == [12, 13, 14]


def test_a_finished_sequence_is_not_extended() -> None:
    proposer, sequence = BlockProposer(), sequence_with(range(10))
    decide(proposer, sequence, range(12))
    sequence.finish_reason = FinishReason.STOP
    assert not proposer.extend(sequence, 8, list(range(8, 40)))


def test_more_is_wanted_once_below_low_water() -> None:
    proposer, sequence = BlockProposer(), sequence_with(range(40))
    decide(proposer, sequence, range(40 - LOW_WATER))
    assert proposer.wanting() == []
    decide(proposer, sequence, [40 - LOW_WATER])
    assert proposer.wanting() == [Wanted("r", tuple(range(41 - LOW_WATER)))]
    decide(proposer, sequence, range(41 - LOW_WATER, 60))
    assert proposer.wanting() == []


def test_without_an_answer_it_is_wanted_again_and_after_one_when_that_runs_low() -> None:
    proposer, sequence = BlockProposer(), sequence_with(range(20))
    decide(proposer, sequence, range(20))
    [first] = proposer.wanting()
    decide(proposer, sequence, range(20, len(first.output) + ASK_AGAIN_AFTER))
    [second] = proposer.wanting()
    assert len(second.output) == len(first.output) + ASK_AGAIN_AFTER
    assert proposer.extend(sequence, len(second.output), list(range(84, 120)))
    decide(proposer, sequence, range(84, 119))
    [third] = proposer.wanting()
    assert len(third.output) == 119


def test_where_answers_are_late_more_is_asked_for_and_earlier() -> None:
    proposer, sequence = BlockProposer(), sequence_with(range(20), length=5000)
    late = 60
    for _ in range(30):
        told: list[Wanted] = []
        while not told:
            decide(proposer, sequence, [sequence.num_output])
            told = proposer.wanting()
        at = len(told[0].output)
        decide(proposer, sequence, range(at, at + late))
        left = proposer.available(sequence)
        length = 20 + told[0].late
        proposer.extend(sequence, at, list(range(at, at + length)))
    assert told[0].late == pytest.approx(late, abs=2)
    assert length - late >= 18, "that much is left of a block when it comes"
    assert left == 0  # a block of 20 cannot last that long


def test_one_that_is_lost_for_good_wants_another_block() -> None:
    proposer, sequence = BlockProposer(), sequence_with(range(100))
    decide(proposer, sequence, [*range(10), *range(300, 300 + LOST_FOR)])
    assert proposer.wanting() == []  # its second disagreement was one token later
    decide(proposer, sequence, [400])
    assert [len(wanted.output) for wanted in proposer.wanting()] == [10 + LOST_FOR + 1]


def test_nothing_is_wanted_without_a_block_nor_at_the_end_nor_unless_it_was_drafted_from() -> None:
    proposer = BlockProposer()
    without, ending, unused = (
        sequence_with([], "without"),
        sequence_with(range(10), "ending", length=12),
        sequence_with(range(10), "unused"),
    )
    decide(proposer, without, range(50))
    decide(proposer, ending, range(8))
    for token in range(30):
        unused.accept([], [token], [0.0])
        proposer.available(unused)
    assert proposer.wanting() == []


def test_no_more_than_a_few_are_told_at_once_and_none_that_was_forgotten() -> None:
    proposer = BlockProposer()
    sequences = [sequence_with(range(10), str(i)) for i in range(WANTED_AT_ONCE + 4)]
    for sequence in sequences:
        decide(proposer, sequence, range(8))
    proposer.forget(sequences[0])
    told = [wanted.request_id for wanted in proposer.wanting()]
    assert told == [str(i) for i in range(1, WANTED_AT_ONCE + 1)]
    assert [w.request_id for w in proposer.wanting()] == [
        str(i) for i in range(WANTED_AT_ONCE + 1, WANTED_AT_ONCE + 4)
    ]


# --- output that is decided -----------------------------------------------------------------
@pytest.mark.parametrize(
    "params",
    [
        pytest.param(SamplingParams(max_tokens=40, ignore_eos=True), id="greedy"),
        pytest.param(SAMPLED, id="sampled"),
        pytest.param(
            replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
            id="penalties",
        ),
        pytest.param(replace(SAMPLED, bad_token_ids=(5, 9), bad_words=((7, 8),)), id="bad words"),
        pytest.param(replace(SAMPLED, ignore_eos=False, min_tokens=35), id="min tokens"),
    ],
)
def test_a_request_goes_on_from_decided_output_as_if_it_had_decided_that_itself(
    tiny_pair: TinyPair, params: SamplingParams
) -> None:
    whole = Request("whole", prompts(1, 20)[0], params, seed=3)
    done = baseline_of(tiny_pair.verifier)(whole)
    begun = bench(tiny_pair.verifier)
    for at in (1, 17, 33):
        begun.add(replace(whole, request_id=str(at), decided_ids=done.token_ids[:at]))
    for name, rest in begun.run().items():
        at = int(name)
        assert rest.token_ids == done.token_ids[at:]
        assert rest.logprobs == done.logprobs[at:]
        assert len(rest.origins) == len(rest.token_ids)
        assert rest.finish_reason == done.finish_reason


def test_decided_output_that_leaves_no_room_or_is_no_token_is_an_error(
    tiny_pair: TinyPair,
) -> None:
    request = Request("r", (1, 2), SamplingParams(max_tokens=3), 1, decided_ids=(4, 5, 6))
    done = bench(tiny_pair.verifier).add(request).run()["r"]
    assert "no room" in str(done.error)
    strange = replace(request, decided_ids=(100_000,))
    done = bench(tiny_pair.verifier).add(strange).run()["r"]
    assert "vocabulary" in str(done.error)


# --- the engine -----------------------------------------------------------------------------
def asked(tiny_pair: TinyPair, count: int = 6, depth: int | None = 4) -> list[Request]:
    """Requests that have the first 14 tokens of their outputs as blocks."""
    made = [
        Request(f"j/{i}/0", prompt, SAMPLED, seed=i, depth=depth)
        for i, prompt in enumerate(prompts(count, seed=5))
    ]
    known = [baseline_of(tiny_pair.verifier)(request) for request in made]
    return [replace(r, draft_ids=c.token_ids[:14]) for r, c in zip(made, known, strict=True)]


def assert_unchanged(
    tiny_pair: TinyPair, requests: list[Request], done: dict[str, Completion]
) -> None:
    for request in requests:
        assert_same(done[request.request_id], baseline_of(tiny_pair.verifier)(request))


@pytest.mark.parametrize("delay", [0, 2, 7], ids=lambda steps: f"{steps} steps late")
@pytest.mark.parametrize("kind", ["right", "edited", "noise"])
def test_hints_change_no_output_and_right_ones_are_used(
    tiny_pair: TinyPair, kind: str, delay: int
) -> None:
    requests = asked(tiny_pair)
    truth = {r.request_id: baseline_of(tiny_pair.verifier)(r).token_ids for r in requests}
    running: Bench = bench(tiny_pair.verifier).add(*requests)
    generator, posted, hints = random.Random(1), [], 0
    step = 0
    while not running.engine.idle:
        running.step()
        step += 1
        posted += [(step + delay, wanted) for wanted in running.engine.wanted()]
        for due, wanted in posted:
            if due != step:
                continue
            at = len(wanted.output)
            ahead = list(truth[wanted.request_id][at : at + 24])
            if kind == "edited":
                del ahead[5:6]
            elif kind == "noise":
                ahead = [generator.randrange(300) for _ in range(24)]
            for _ in range(2):  # every message is delivered twice
                running.engine.hint(wanted.request_id, at, tuple(ahead))
                hints += 1
    assert_unchanged(tiny_pair, requests, running.finished)
    stats = running.engine.stats
    assert stats.hints_followed < hints
    if kind != "noise":
        assert stats.hints_followed >= len(requests)
        drafted = sum(c.accepted for c in running.finished.values())
        assert drafted > 1.5 * 14 * len(requests)  # more than the blocks held


def test_strange_hints_are_ignored(tiny_pair: TinyPair) -> None:
    requests = asked(tiny_pair, 2)
    running = bench(tiny_pair.verifier).add(*requests)
    running.step()
    running.engine.hint("j/99/0", 0, (1, 2, 3))
    running.engine.hint("j/0/0", 0, (1, 2, 300_000))
    running.engine.hint("j/0/0", 10_000, (1, 2, 3))
    assert_unchanged(tiny_pair, requests, running.run())
    assert running.engine.stats.hints_followed == 0


def test_a_service_tells_what_is_wanted_and_takes_hints_from_any_thread(
    tiny_pair: TinyPair,
) -> None:
    requests = asked(tiny_pair)
    truth = {r.request_id: baseline_of(tiny_pair.verifier)(r).token_ids for r in requests}

    def answer(wanted: Wanted) -> None:
        at = len(wanted.output)
        service.hint(wanted.request_id, at, truth[wanted.request_id][at : at + 24])

    service = EngineService(lambda: bench(tiny_pair.verifier).engine, on_wanted=answer)
    try:
        service.hint("j/0/0", 0, (1, 2, 3))  # before there is an engine
        done = {c.request_id: c for c in service.submit("j", requests).wait(PATIENCE_SEC)}
        assert_unchanged(tiny_pair, requests, done)
        assert service.stats.hints_followed >= len(requests)
    finally:
        service.close()
