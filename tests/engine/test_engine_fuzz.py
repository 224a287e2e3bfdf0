"""Anything may arrive, leave, be preempted or be guessed wrongly at any time: outputs stay."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
from engine.decoding import (
    VOCAB,
    Bench,
    assert_counts_add_up,
    assert_same,
    baseline_of,
    bench,
    watch_text,
)
from engine.decoding import prompts as make_prompts

from specbatch.pipeline.engine.sequence import Request, Sequence
from specbatch.schemas.records import FinishReason, SamplingParams
from support.models import TinyPair


class Gossip:
    """A proposer that makes things up, and sometimes says less than it promised."""

    name = "gossip"
    pass_time = None

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def available(self, sequence: Sequence) -> int:  # noqa: ARG002 - knows nothing of it
        return self._random.randint(0, 6)

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        lengths = [self._random.randint(0, d) for _, d in zip(sequences, depths, strict=True)]
        return [[self._random.randrange(VOCAB) for _ in range(n)] for n in lengths]

    def settle(self, sequence: Sequence) -> None:
        """Learns nothing."""

    def forget(self, sequence: Sequence) -> None:
        """Knew nothing."""


TEMPLATES = make_prompts(2, 70, 70, seed=70)


def random_request(generator: random.Random, index: int, verifier: Path) -> Request:
    most = generator.randint(1, 28)
    params = SamplingParams(
        max_tokens=most,
        min_tokens=generator.choice([0, 0, min(most, 6)]),
        temperature=generator.choice([0.0, 0.7, 1.2]),
        top_k=generator.choice([0, 0, 20]),
        top_p=generator.choice([1.0, 0.9]),
        min_p=generator.choice([0.0, 0.0, 0.02]),
        stop_token_ids=tuple(generator.sample(range(VOCAB), generator.choice([0, 3, 12]))),
        ignore_eos=generator.random() < 0.5,
        repetition_penalty=generator.choice([1.0, 1.0, 1.2]),
        frequency_penalty=generator.choice([0.0, 0.0, 0.5]),
        bad_words=generator.choice([(), tuple((a, b) for a in range(40) for b in (7, 80))]),
        stop=generator.choice([(), (), ("a", "q")]),
        top_logprobs=(0, 4, 0, 20)[index % 4],
    )
    prompt = make_prompts(1, 1, 90, seed=generator.randrange(2**30))[0]
    if generator.random() < 0.5:
        prompt = (*generator.choice(TEMPLATES), *prompt[: generator.choice([1, 1, 20])])
    plain = Request(str(index), prompt, params, generator.randrange(2**63))
    block: list[int] = []
    if generator.random() < 0.6:
        block = list(baseline_of(verifier)(plain).token_ids)
        for _ in range(generator.randint(0, 3)):
            at = generator.randrange(len(block))
            block[at : at + generator.randint(0, 2)] = [generator.randrange(VOCAB)]
    depth = generator.choice([None, None, 0, 1, 4, 8])
    watch = watch_text(params)
    return Request(plain.request_id, prompt, params, plain.seed, tuple(block), depth, watch)


def named(request_id: str) -> Callable[[Request], bool]:
    return lambda request: request.request_id == request_id


def random_bench(generator: random.Random, pair: TinyPair) -> Bench:
    return bench(
        pair.verifier,
        generator.choice([None, pair.draft, pair.verifier]),
        others=[Gossip(generator.randrange(1000))] if generator.random() < 0.5 else [],
        max_sequences=generator.choice([2, 5, 40]),
        max_batch_tokens=generator.choice([5, 33, 2048]),
        num_blocks=generator.choice([6, 10, 200]),
        draft_blocks=generator.choice([3, 9, 200]),
        share_prefixes=generator.random() < 0.8,
    )


@pytest.mark.parametrize("seed", range(12))
def test_outputs_are_those_of_one_request_at_a_time(tiny_pair: TinyPair, seed: int) -> None:
    generator = random.Random(seed)
    one = random_bench(generator, tiny_pair)
    arriving = [random_request(generator, i, tiny_pair.verifier) for i in range(18)]
    asked = {request.request_id: request for request in arriving}
    while arriving or not one.engine.idle:
        for _ in range(min(len(arriving), generator.choice([0, 0, 1, 4]))):
            one.add(arriving.pop())
        if generator.random() < 0.06:
            victim = str(generator.randrange(18))
            one.keep(one.engine.cancel(named(victim)))
        one.step()
    assert one.finished.keys() == asked.keys()
    for name, completion in one.finished.items():
        truth = baseline_of(tiny_pair.verifier)(asked[name])
        if completion.finish_reason is FinishReason.CANCELLED:
            count = len(completion.token_ids)
            assert completion.token_ids == truth.token_ids[:count]
            assert completion.logprobs == truth.logprobs[:count]
            assert_counts_add_up(completion)
        else:
            assert_same(completion, truth)
    one.assert_all_blocks_are_free()
