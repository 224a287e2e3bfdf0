"""Last night's output is drafted again, the outputs of others where it does not fit."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
from engine.decoding import VOCAB, assert_same, baseline_of, bench
from engine.decoding import prompts as make_prompts
from engine.replaying import PLAIN, Replayed, decide, edited, replay, sequence_of, text

from specbatch.pipeline.engines.contract import Match, Request
from specbatch.pipeline.engines.proposers.history import History, HistoryProposer
from specbatch.pipeline.engines.proposers.ngram import NgramProposer
from specbatch.pipeline.engines.proposers.suffix_index import SuffixIndex
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.schemas.records import SamplingParams
from specbatch.schemas.speculation import PastOutput
from support.models import TinyPair

DEPTH = 16
ANY_EDIT = ("replaced", "inserted", "removed")


def index_of(*outputs: Seq[int]) -> SuffixIndex:
    return SuffixIndex.build(outputs, 1_000_000)


def sequence_after(
    past: Seq[int] = (), history: SuffixIndex | None = None, output: Seq[int] = ()
) -> Sequence:
    sequence = sequence_of(replace(PLAIN, past_ids=tuple(past), history=history))
    decide(sequence, output)
    return sequence


def rerun(
    truth: Seq[int], past: Seq[int] = (), history: SuffixIndex | None = None, depth: int = DEPTH
) -> Replayed:
    return replay(HistoryProposer(), sequence_after(past, history), truth, depth)


class CountingIndex(SuffixIndex):
    """Knows how often it was searched."""

    searches = 0

    def find(self, context: Seq[int], shortest: int = 1) -> Match | None:
        self.searches += 1
        return super().find(context, shortest)


# --- the past output -----------------------------------------------------------------------------
@pytest.mark.parametrize("depth", [1, 7, 16])
def test_a_rerun_is_drafted_as_far_as_the_cap_allows(depth: int) -> None:
    truth = text(340)
    done = rerun(truth, past=truth, depth=depth)
    assert done.accepted == done.proposed
    assert done.passes == -(-340 // (depth + 1))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("vocab", [250, 30])
def test_a_rerun_with_some_tokens_replaced_still_is_drafted_well(seed: int, vocab: int) -> None:
    truth = text(1000, seed, vocab)
    done = rerun(truth, past=edited(truth, 0.05, ["replaced"], seed))
    assert done.mean_accepted >= 6


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kinds", [*((kind,) for kind in ANY_EDIT), ANY_EDIT], ids=str)
def test_after_any_edit_the_place_is_found_again(kinds: Seq[str], seed: int) -> None:
    truth = text(1000, seed)
    past = edited(truth, 0.05, kinds, seed)
    done = rerun(truth, past, index_of(past, *(text(1000, 10 + i) for i in range(5))))
    assert done.mean_accepted >= 3
    assert done.accepted >= 0.3 * done.proposed


def test_the_class_tells_a_past_that_fits_from_a_doubted_one() -> None:
    past, proposer = text(100), HistoryProposer()
    sequence = sequence_after(past)
    assert proposer.confidence_bucket(sequence) == 6
    decide(sequence, past[:5])
    assert proposer.confidence_bucket(sequence) == 6
    decide(sequence, [299])
    assert proposer.confidence_bucket(sequence) == 5
    assert proposer.propose([sequence], [4]) == [past[6:10]]
    decide(sequence, past[6:16])
    assert proposer.confidence_bucket(sequence) == 5
    decide(sequence, past[16:30])
    assert proposer.confidence_bucket(sequence) == 6


def test_without_a_past_nothing_is_offered() -> None:
    proposer, sequence = HistoryProposer(), sequence_after(output=[1, 2, 3])
    assert (proposer.available(sequence), proposer.confidence_bucket(sequence)) == (0, 0)
    assert proposer.propose([sequence], [4]) == [[]]


def test_a_past_that_is_over_offers_nothing_more() -> None:
    proposer, sequence = HistoryProposer(), sequence_after([4, 5, 6])
    assert proposer.propose([sequence], [8]) == [[4, 5, 6]]
    decide(sequence, [4, 5, 6])
    assert (proposer.available(sequence), proposer.confidence_bucket(sequence)) == (0, 0)
    assert proposer.propose([sequence], [8]) == [[]]


def test_tokens_of_another_tokenizer_are_no_past() -> None:
    past = [1, 2, 3, 4, 5, 300]
    sequence = sequence_after(past, index_of(past), output=[1, 2, 3])
    assert HistoryProposer(301).available(sequence) == 3
    assert HistoryProposer(300).available(sequence) == 0


# --- the index -----------------------------------------------------------------------------------
def test_other_outputs_are_followed_from_three_tokens_in_common() -> None:
    index = index_of([*range(100, 110), *range(20)], range(50, 90))
    proposer = HistoryProposer()
    sequence = sequence_after(history=index, output=[200, 3, 4])
    assert proposer.available(sequence) == 0
    decide(sequence, [5])
    assert proposer.available(sequence) == 14
    assert proposer.propose([sequence], [4]) == [[6, 7, 8, 9]]


def test_a_sequence_that_follows_searches_once() -> None:
    truth = text(500)
    built = index_of(text(300, seed=1), truth)
    index = CountingIndex(built._row, built._offsets)
    done = rerun(truth, history=index)
    assert done.mean_accepted >= 12
    assert index.searches <= 4, "until three tokens were there"


def test_a_hopeless_text_searches_less_and_less() -> None:
    built = index_of(text(500, seed=1))
    index = CountingIndex(built._row, built._offsets)
    done = rerun(range(300, 700), history=index)
    assert done.proposed == 0
    assert index.searches <= 5 + 400 // 16


def test_a_text_of_many_pieces_is_searched_for_at_every_seam() -> None:
    generator = random.Random(3)
    outputs = [text(200, seed) for seed in range(20)]
    truth = []
    for _ in range(30):
        output, at = generator.choice(outputs), generator.randrange(150)
        truth += output[at : at + 40]
    done = rerun(truth, history=index_of(*outputs))
    assert done.mean_accepted >= 4


def test_the_class_tells_long_matches_and_clear_majorities() -> None:
    outputs = [[*range(20), 50 + i % 2, i] for i in range(6)]
    split, clear = index_of(*outputs), index_of(range(40))
    buckets = {
        (name, length): HistoryProposer().confidence_bucket(
            sequence_after(history=index, output=range(20 - length, 20))
        )
        for name, index in (("split", split), ("clear", clear))
        for length in (3, 12)
    }
    assert buckets == {
        ("split", 3): 1,
        ("clear", 3): 2,
        ("split", 12): 3,
        ("clear", 12): 4,
    }


def test_a_past_that_is_over_or_lost_gives_way_to_the_index_and_comes_back() -> None:
    past = text(60)
    other = text(300, seed=1)
    index = index_of(other)
    proposer, sequence = HistoryProposer(), sequence_after(past, index, output=past[:20])
    assert proposer.propose([sequence], [3]) == [past[20:23]]
    for token in other[100:110]:
        decide(sequence, [token])
        proposer.available(sequence)
    assert proposer.propose([sequence], [3]) == [other[110:113]]
    assert 1 <= proposer.confidence_bucket(sequence) <= 4
    for token in past[40:46]:
        decide(sequence, [token])
        proposer.available(sequence)
    assert proposer.propose([sequence], [3]) == [past[46:49]]
    assert proposer.confidence_bucket(sequence) == 5
    decide(sequence, [*past[46:], *other[30:36]])
    assert proposer.propose([sequence], [3]) == [other[36:39]]


# --- the contract --------------------------------------------------------------------------------
def test_a_forgotten_sequence_holds_nothing_and_may_come_back() -> None:
    past = text(80)
    proposer, sequence = HistoryProposer(), sequence_after(past, index_of(past), past[:30])
    before = proposer.propose([sequence], [4])
    proposer.forget(sequence)
    assert not proposer._progress
    assert proposer.propose([sequence], [4]) == before == [past[30:34]]
    proposer.forget(sequence_after())  # never seen: nothing to do


def test_what_was_written_unasked_is_caught_up_with() -> None:
    past = text(200)
    proposer, sequence = HistoryProposer(), sequence_after(past, index_of(past))
    proposer.available(sequence)
    for token in [*edited(past[:120], 0.1, ANY_EDIT), *past[120:130]]:
        decide(sequence, [token])
    assert proposer.propose([sequence], [5]) == [past[130:135]]


def noisy(output: Seq[int], generator: random.Random) -> tuple[int, ...]:
    tokens = list(output)
    for _ in range(3):
        at = generator.randrange(len(tokens))
        tokens[at : at + generator.randint(0, 2)] = [generator.randrange(VOCAB)]
    return tuple(tokens)


@pytest.mark.parametrize("num_blocks", [200, 8], ids=["ample memory", "preempted"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_are_those_without_drafts(
    tiny_pair: TinyPair, temperature: float, num_blocks: int
) -> None:
    generator = random.Random(5)
    truth = baseline_of(tiny_pair.verifier)
    params = SamplingParams(max_tokens=60, temperature=temperature, ignore_eos=True)
    asked = [
        Request(str(i), prompt, params, seed=i, depth=(None, 3, 8)[i % 3])
        for i, prompt in enumerate(make_prompts(8, 20, 60, seed=4))
    ]
    outputs = {request.request_id: truth(request).token_ids for request in asked}
    history = History.build(
        [PastOutput("job", name, 0, noisy(output, generator)) for name, output in outputs.items()],
        max_tokens=100_000,
    )
    requests = [
        replace(
            request,
            past_ids=history.past(request.request_id, 0) if i % 2 else (),
            history=history.index if i % 4 < 2 or not i % 2 else None,
        )
        for i, request in enumerate(asked)
    ]
    proposer = HistoryProposer(VOCAB)
    one = bench(
        tiny_pair.verifier,
        others=[proposer, NgramProposer()],
        num_blocks=num_blocks,
        max_sequences=6,
    )
    finished = one.add(*requests).run()
    for request in requests:
        assert_same(finished[request.request_id], truth(request))
    assert one.engine.stats.accepted > 100
    assert (one.blocks.preempted > 0) == (num_blocks == 8)
    assert not proposer._progress
