"""Anything may arrive, leave, be preempted or be guessed wrongly at any time: outputs stay."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
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
from engine.naive import decode
from torch import Tensor

from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.pipeline.engines.exact.draft_model import DraftModelProposer
from specbatch.pipeline.engines.exact.model.batch import Chunk
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.schemas.provenance import NO_TICKS, Ticks
from specbatch.schemas.records import WITHHELD, FinishReason, Origin, SamplingParams
from support.models import TinyPair


class Gossip(Proposer):
    """A proposer that makes things up, and sometimes says less than it promised."""

    name = "gossip"

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def available(self, sequence: Sequence) -> int:  # noqa: ARG002 - knows nothing of it
        return self._random.randint(0, 6)

    def confidence_bucket(self, sequence: Sequence) -> int:  # noqa: ARG002 - knows nothing of it
        return self._random.randint(0, 2)

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        lengths = [self._random.randint(0, d) for _, d in zip(sequences, depths, strict=True)]
        return [[self._random.randrange(VOCAB) for _ in range(n)] for n in lengths]


TEMPLATES = make_prompts(2, 70, 70, seed=70)
BY_ENGINES = set(FinishReason) - {FinishReason.TOOL_CALLS, *WITHHELD}  # recording says the others


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
        presence_penalty=generator.choice([0.0, 0.0, 0.7]),
        logit_bias=generator.choice([(), (), ((7, 3.0), (65, -2.0), (101, 2.5))]),
        bad_token_ids=tuple(generator.sample(range(VOCAB), generator.choice([0, 0, 20]))),
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


def bad_request(generator: random.Random, index: int) -> Request:
    """One that is answered with an error, and disturbs nobody."""
    good = SamplingParams(max_tokens=5)
    prompt, params = generator.choice(
        [
            ((), good),
            ((1, VOCAB), good),
            (tuple(range(250)) * 40, good),  # beyond any cache here, and the context
            ((1, 2), replace(good, bad_token_ids=tuple(range(VOCAB)))),
            ((1, 2), replace(good, logit_bias=((-1, 1.0),))),
            ((1, 2), replace(good, stop=("x",))),  # and nobody to watch the text
        ]
    )
    return Request(f"bad-{index}", prompt, params, seed=1)


class Faults:
    """Now and then the verifier's pass gives one sequence NaN for logits."""

    def __init__(self, one: Bench, generator: random.Random) -> None:
        self._scheduler, self._random = one.engine._scheduler, generator
        self._forward = one.runners[0].forward
        self.failed: set[str] = set()
        one.runners[0].forward = self  # type: ignore[method-assign]  # errs at times

    def __call__(self, chunks: Seq[Chunk]) -> Tensor:
        logits = self._forward(chunks)
        rows, end = {}, 0
        for chunk in chunks:
            end += chunk.logit_rows
            rows[id(chunk.kv)] = slice(end - chunk.logit_rows, end)
        deciding = [s for s in self._scheduler.running if (at := rows.get(id(s.kv))) and _any(at)]
        if deciding and self._random.random() < 0.04:
            victim = self._random.choice(deciding)
            logits = logits.clone()
            logits[rows[id(victim.kv)]] = torch.nan
            self.failed.add(victim.request.request_id)
        return logits


def _any(rows: slice) -> bool:
    return bool(rows.stop > rows.start)


def assert_the_books_balance(one: Bench) -> None:
    """Blocks are held by those that run and by nobody else; who may still write one is alone."""
    engine = one.engine
    holders = [[s.kv for s in engine._scheduler.running]]
    for guarded in engine._speculator.proposers:
        proposer = guarded._proposer
        if isinstance(proposer, DraftModelProposer):
            assert proposer._kv.keys() <= set(engine._scheduler.running)
            holders.append(list(proposer._kv.values()))
    assert all(not s.kv.blocks for s in engine._scheduler.waiting)
    for runner, kvs in zip(one.runners, holders, strict=True):
        held = Counter(block for kv in kvs for block in kv.blocks)
        assert runner.blocks.free_blocks + len(held) == runner.blocks.num_blocks - 1
        assert {b: n for b, n in enumerate(runner.blocks._holders) if n} == dict(held)
        for kv in kvs:
            assert all(held[block] == 1 for block in kv.blocks[kv.sealed :])


def assert_the_time_is_all_shared(one: Bench) -> None:
    """Those who finished, failed, were cancelled or still run had all the ticks there are."""
    times = [c.ticks for c in one.finished.values()]
    times += [Ticks(*sequence.time) for sequence in one.engine.unfinished]
    assert sum(times, start=NO_TICKS) == one.engine.stats.ticks


def assert_provenance_fits(completion: Completion) -> None:
    """A pass ends with the first token that was not accepted, or with the completion."""
    found, origins = completion.provenance, completion.origins
    ends = [i for i, origin in enumerate(origins) if origin != Origin.ACCEPTED]
    if origins and (not ends or ends[-1] < len(origins) - 1):
        ends.append(len(origins) - 1)
    drafted = [end for end in ends if origins[end] != Origin.PLAIN]
    corrected = origins.count(Origin.CORRECTED)
    assert len(found.steps) == len(found.pass_ticks) == len(ends) == completion.verifier_passes
    assert list(found.steps) == sorted(set(found.steps))
    assert len(found.makers) == len(found.drafted) == len(drafted)
    assert len(found.rejected) == corrected
    assert sum(found.drafted) == completion.proposed
    assert {*found.makers} == {*range(len(found.sources))}
    assert sum(found.pass_ticks) <= completion.ticks.total


@lru_cache(maxsize=64)
def check(pair: TinyPair, seed: int) -> Counter[str]:
    """One engine's life, with requests that come, go, fail and are wrong; what happened in it."""
    generator = random.Random(seed)
    one = random_bench(generator, pair)
    faults = Faults(one, random.Random(seed))
    arriving = [random_request(generator, i, pair.verifier) for i in range(18)]
    asked = {request.request_id: request for request in arriving}
    arriving += [bad_request(generator, i) for i in range(2)]
    generator.shuffle(arriving)
    while arriving or not one.engine.idle:
        for _ in range(min(len(arriving), generator.choice([0, 0, 1, 4]))):
            one.add(arriving.pop())
        if generator.random() < 0.06:
            victim = str(generator.randrange(18))
            one.keep(one.engine.cancel(named(victim)))
        one.step()
        assert_the_books_balance(one)
        assert_the_time_is_all_shared(one)
    assert one.finished.keys() == {*asked, "bad-0", "bad-1"}
    for name, completion in one.finished.items():
        if name not in asked:
            assert completion.finish_reason is FinishReason.ERROR
            assert not completion.token_ids
            continue
        assert_provenance_fits(completion)
        truth = baseline_of(pair.verifier)(asked[name])
        assert (completion.finish_reason is FinishReason.ERROR) == (name in faults.failed)
        if completion.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR):
            count = len(completion.token_ids)
            assert completion.token_ids == truth.token_ids[:count]
            assert completion.logprobs == truth.logprobs[:count]
            if completion.finish_reason is FinishReason.CANCELLED:
                assert_counts_add_up(completion)
        else:
            assert_same(completion, truth)
    one.assert_all_blocks_are_free()
    return happened_in(one)


def happened_in(one: Bench) -> Counter[str]:
    stats, done = one.engine.stats, one.finished.values()
    cut_short = [c.finish_reason for c in done if c.token_ids]
    return Counter(
        {
            "preempted": one.blocks.preempted,
            "reused": stats.reused_tokens,
            "accepted": stats.accepted,
            "refused": stats.proposed - stats.accepted,
            "by a draft model": sum(
                isinstance(p._proposer, DraftModelProposer) and p.pass_time.observations > 0
                for p in one.engine._speculator.proposers
            ),
            **{
                reason.value: cut_short.count(reason)
                for reason in FinishReason
                if reason in BY_ENGINES
            },
        }
    )


def test_outputs_are_those_of_one_request_at_a_time(tiny_pair: TinyPair) -> None:
    happened: Counter[str] = Counter()
    for seed in range(8):
        happened.update(check(tiny_pair, seed))
    assert len(happened) == 9
    assert all(count > 1 for count in happened.values()), "what the lives are about"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8, 200))
def test_outputs_are_those_of_one_request_at_a_time_in_many_lives(
    tiny_pair: TinyPair, seed: int
) -> None:
    check(tiny_pair, seed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_request_at_a_time_is_the_naive_decoder(tiny_pair: TinyPair, dtype: str) -> None:
    generator = random.Random(5)
    for i in range(10):
        request = random_request(generator, i, tiny_pair.verifier)
        naive = decode(tiny_pair.verifier, request, dtype)
        engine = baseline_of(tiny_pair.verifier, dtype)(request)
        assert engine.token_ids == tuple(naive.output)
        assert engine.logprobs == tuple(naive.logprobs)
        assert engine.finish_reason is naive.finish_reason
