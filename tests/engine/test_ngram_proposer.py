"""A sequence that repeats itself drafts for itself, and writes what it would have written."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
from engine.decoding import assert_same, baseline_of, bench
from engine.decoding import prompts as make_prompts
from engine.replaying import decide, replay, sequence_with, text

from specbatch.pipeline.engines.contract import Request
from specbatch.pipeline.engines.proposers.ngram import NgramProposer
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.schemas.records import SamplingParams
from support.models import TinyPair


class CountingProposer(NgramProposer):
    """Knows how many tokens it has drafted."""

    def __init__(self) -> None:
        super().__init__()
        self.drafted = 0

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        drafts = super().propose(sequences, depths)
        self.drafted += sum(map(len, drafts))
        return drafts


def test_it_goes_on_like_the_prompt_did() -> None:
    sequence = sequence_with([1, 2, 3, 4, 5, 6, 7, 8], [90, 3, 4])
    proposer = NgramProposer()
    assert proposer.available(sequence) == 7
    assert proposer.propose([sequence], [4]) == [[5, 6, 7, 8]]
    assert proposer.propose([sequence], [50]) == [[5, 6, 7, 8, 90, 3, 4]]


def test_a_copy_of_the_prompt_is_drafted_to_its_end() -> None:
    prompt = text(200)
    done = replay(NgramProposer(), sequence_with([*prompt, 999]), prompt, depth=16)
    assert done.accepted == done.proposed
    assert done.passes == 2 + -(-198 // 17)  # a pair to find the place, then 16 and one at a time


def test_a_text_without_repeats_is_not_drafted_for() -> None:
    done = replay(NgramProposer(), sequence_with([1000]), list(range(300)), depth=8)
    assert (done.proposed, done.passes) == (0, 300)


@pytest.mark.parametrize(
    ("length", "bucket"),
    [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (16, 4), (17, 5), (60, 5)],
)
def test_the_bucket_is_that_of_the_tokens_in_common(length: int, bucket: int) -> None:
    phrase = list(range(100, 100 + length))
    sequence = sequence_with([1, *phrase, 2, 3, *phrase])
    assert NgramProposer().confidence_bucket(sequence) == bucket


def test_the_class_rises_while_the_output_follows() -> None:
    prompt = text(100)
    sequence, proposer = sequence_with([*prompt, 999]), NgramProposer()
    buckets = []
    for token in prompt[:40]:
        decide(sequence, [token])
        buckets.append(proposer.confidence_bucket(sequence))
    assert buckets == sorted(buckets)
    assert (buckets[0], buckets[-1]) == (0, 5)


def test_what_was_written_unasked_is_caught_up_with() -> None:
    asked, unasked = (sequence_with(text(50, vocab=6)) for _ in range(2))
    proposer = NgramProposer()
    for token in text(80, seed=1, vocab=6):
        decide(asked, [token])
        decide(unasked, [token])
        proposer.available(asked)
    assert proposer.available(asked) == proposer.available(unasked) > 0
    first, second = proposer.propose([asked, unasked], [5, 5])
    assert first == second


def test_a_forgotten_sequence_holds_nothing_and_may_come_back() -> None:
    proposer, sequence = NgramProposer(), sequence_with(text(60, vocab=5))
    before = proposer.propose([sequence], [4])
    proposer.forget(sequence)
    assert not proposer._finders
    assert proposer.propose([sequence], [4]) == before != [[]]
    proposer.forget(sequence_with([]))  # never seen: nothing to do


@pytest.mark.parametrize("num_blocks", [200, 8], ids=["ample memory", "preempted"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_are_those_without_drafts(
    tiny_pair: TinyPair, temperature: float, num_blocks: int
) -> None:
    params = SamplingParams(max_tokens=60, temperature=temperature, ignore_eos=True)
    repeating = [(*p, *p) for p in make_prompts(6, 20, 30, seed=3)]
    requests = [
        Request(str(i), prompt, params, seed=i, depth=(None, 3, 8)[i % 3])
        for i, prompt in enumerate(repeating)
    ]
    proposer = CountingProposer()
    one = bench(tiny_pair.verifier, others=[proposer], num_blocks=num_blocks, max_sequences=6)
    finished = one.add(*requests).run()
    truth = baseline_of(tiny_pair.verifier)
    for request in requests:
        assert_same(finished[request.request_id], truth(replace(request, depth=0)))
    assert proposer.drafted == one.engine.stats.proposed > 0
    assert (one.blocks.preempted > 0) == (num_blocks == 8)
    assert not proposer._finders
