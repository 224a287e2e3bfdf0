"""Sequences that begin alike compute the beginning once, and write what they would have alone."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine.decoding import Bench, assert_same, baseline_of, bench, prompts
from torch import Tensor

from specbatch.kernels.decoder.contract import BLOCK_SIZE
from specbatch.kernels.multi_step.contract import Generated
from specbatch.pipeline.engines.contract import Request
from specbatch.pipeline.engines.exact.model.batch import Chunk
from specbatch.pipeline.engines.exact.scheduler import Scheduler
from specbatch.pipeline.engines.state.kv_blocks import BlockManager
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.engines.state.step import Planned
from specbatch.schemas.records import FinishReason, SamplingParams
from support.grids import pairwise
from support.models import TinyPair

SAMPLED = SamplingParams(max_tokens=30, temperature=0.8, top_p=0.95, ignore_eos=True)
TEMPLATES = prompts(2, 70, 70, seed=7)


def alike(depth: int | None = None) -> list[Request]:
    """Two templates with four rows each, and four samples of one prompt."""
    tails = prompts(8, 1, 20, seed=8)
    asked = [(*TEMPLATES[i % 2], *tail) for i, tail in enumerate(tails)]
    asked += [prompts(1, 67, 67, seed=9)[0]] * 4
    return [Request(str(i), p, SAMPLED, seed=50 + i, depth=depth) for i, p in enumerate(asked)]


class Counted:
    """Counts the tokens that a runner is fed."""

    def __init__(self, one: Bench, index: int = 0) -> None:
        self.tokens = 0
        runner = one.runners[index]
        self._forward, self._draft, self._generate = runner.forward, runner.draft, runner.generate
        runner.forward = self  # type: ignore[method-assign, assignment]  # counts
        runner.draft = self.draft  # type: ignore[method-assign]  # counts
        runner.generate = self.generate  # type: ignore[method-assign]  # counts

    def __call__(self, chunks: Seq[Chunk]) -> Tensor:
        self.tokens += sum(len(chunk.token_ids) for chunk in chunks)
        return self._forward(chunks)

    def draft(self, chunks: Seq[Chunk], depths: list[int], *rest: Any) -> Tensor:
        """All passes of a draft in one call: the chunks, then a token for each but the last."""
        self.tokens += sum(len(c.token_ids) + d - 1 for c, d in zip(chunks, depths, strict=True))
        return self._draft(chunks, depths, *rest)

    def generate(self, chunks: Seq[Chunk], *rest: Any) -> Generated:
        """Several passes in one call: each sequence is fed as many tokens as it gets."""
        generated = self._generate(chunks, *rest)
        self.tokens += sum(generated.made)
        return generated


@pairwise(
    depth=[0, 4, None], tight=[False, True], concurrent=[1, 7, 16], dtype=["float32", "bfloat16"]
)
def test_sharing_changes_no_bit(
    tiny_pair: TinyPair, depth: int | None, tight: bool, concurrent: int, dtype: str
) -> None:
    asked = alike(depth)
    one = bench(
        tiny_pair.verifier,
        tiny_pair.draft,
        dtype=dtype,
        max_sequences=concurrent,
        num_blocks=10 if tight else 1024,
        max_batch_tokens=29 if tight else 2048,
    )
    got = one.add(*asked).run()
    for request in asked:
        assert_same(got[request.request_id], baseline_of(tiny_pair.verifier, dtype)(request))
    assert one.engine.stats.reused_tokens > 0
    assert (one.blocks.preempted > 0) == (tight and concurrent > 1)
    one.assert_all_blocks_are_free()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sharing_changes_no_bit_on_the_torch_path(tiny_pair: TinyPair, dtype: str) -> None:
    """For models that could run natively as well."""
    outputs = []
    for share in (False, True):
        one = bench(
            tiny_pair.verifier, tiny_pair.draft, dtype=dtype, native=False, share_prefixes=share
        )
        outputs.append(one.add(*alike(depth=4)).run())
        assert (one.engine.stats.reused_tokens > 0) == share
    for name, completion in outputs[0].items():
        assert_same(outputs[1][name], completion)


def test_samples_of_one_prompt_compute_it_once(tiny_pair: TinyPair) -> None:
    prompt = prompts(1, 100, 100)[0]
    asked = [Request(str(i), prompt, SAMPLED, seed=i, depth=0) for i in range(4)]
    fed = []
    for share in (False, True):
        one = bench(tiny_pair.verifier, share_prefixes=share)
        counted = Counted(one)
        one.add(*asked).run()
        fed.append(counted.tokens)
        assert one.engine.stats.reused_tokens == (3 * 96 if share else 0)
    assert fed[0] - fed[1] == 3 * 96


def test_the_draft_model_shares_as_well(tiny_pair: TinyPair) -> None:
    asked = [Request(str(i), (*TEMPLATES[0], i), SAMPLED, seed=i, depth=2) for i in range(6)]
    fed = []
    for share in (False, True):
        one = bench(tiny_pair.verifier, tiny_pair.verifier, share_prefixes=share)
        counted = Counted(one, 1)
        one.add(*asked).run()
        fed.append(counted.tokens)
        one.assert_all_blocks_are_free()
    assert fed[0] - fed[1] == 5 * 64, "two full blocks of the template, for all but the first"


def test_a_preempted_sequence_finds_what_it_left(tiny_pair: TinyPair) -> None:
    """Nobody else begins like it, so all that is reused was its own."""
    asked = [Request(str(i), p, SAMPLED, seed=i) for i, p in enumerate(prompts(6, 60, 64, seed=3))]
    one = bench(tiny_pair.verifier, num_blocks=12)
    got = one.add(*asked).run()
    assert one.blocks.preempted > 0
    assert one.engine.stats.reused_tokens > 0
    for request in asked:
        assert_same(got[request.request_id], baseline_of(tiny_pair.verifier)(request))


@pytest.mark.parametrize("num_blocks", [10, 1024], ids=["preempted", "ample"])
@pytest.mark.parametrize("after", [1, 2, 5, 9])
def test_those_that_stay_keep_what_the_cancelled_shared(
    tiny_pair: TinyPair, num_blocks: int, after: int
) -> None:
    asked = alike(depth=4)
    one = bench(tiny_pair.verifier, tiny_pair.draft, num_blocks=num_blocks, max_batch_tokens=64)
    one.add(*asked)
    for _ in range(after):
        one.step()
    one.keep(one.engine.cancel(lambda r: int(r.request_id) % 4 in (0, 1)))
    one.run()
    for request in asked:
        completion = one.finished[request.request_id]
        if completion.finish_reason is not FinishReason.CANCELLED:
            assert_same(completion, baseline_of(tiny_pair.verifier)(request))
    one.assert_all_blocks_are_free()


def test_a_nan_is_not_handed_on(tiny_pair: TinyPair) -> None:
    """A pass that goes wrong once fails its sequence, not those that begin alike later."""
    request = Request("first", (*TEMPLATES[0], 5), SAMPLED, seed=1, depth=0)
    one = bench(tiny_pair.verifier)
    forward = one.runners[0].forward
    one.runners[0].forward = (  # type: ignore[method-assign]  # the device errs once
        lambda chunks: torch.full_like(forward(chunks), torch.nan)
    )
    one.add(request).step()
    assert one.finished["first"].finish_reason is FinishReason.ERROR
    one.runners[0].forward = forward  # type: ignore[method-assign]  # and is well again
    got = one.add(replace(request, request_id="second")).run()
    assert one.engine.stats.reused_tokens == 0
    assert_same(got["second"], baseline_of(tiny_pair.verifier)(request))


# --- who waits for whom -------------------------------------------------------------------------
def row(tokens: Seq[int]) -> Sequence:
    return Sequence(Request("", tuple(tokens), SAMPLED, 0), frozenset(), max_length=1000)


def scheduler_of(*rows: Sequence, budget: int = 1000, seats: int = 8) -> Scheduler:
    scheduler = Scheduler(BlockManager(40, BLOCK_SIZE), seats, budget)
    scheduler.waiting.extend(rows)
    return scheduler


def compute(scheduler: Scheduler, plan: list[Planned]) -> None:
    """What a step does to its sequences, without a model."""
    for planned in plan:
        sequence = planned.sequence
        decides = planned.decides
        sequence.kv.length += planned.take
        scheduler._blocks.seal(sequence.kv, sequence.tokens)
        if decides:
            sequence.tokens.append(0)


def test_one_of_each_template_goes_first_and_the_others_follow() -> None:
    rows = [row((*TEMPLATES[i // 3], i)) for i in range(6)]
    scheduler = scheduler_of(*rows)
    plan = scheduler.schedule()
    assert [p.sequence for p in plan] == [rows[0], rows[3]]
    assert list(scheduler.waiting) == [rows[1], rows[2], rows[4], rows[5]]
    compute(scheduler, plan)
    plan = scheduler.schedule()
    assert [p.sequence for p in plan] == [rows[i] for i in (0, 3, 1, 2, 4, 5)]
    assert [p.take for p in plan] == [1, 1, 7, 7, 7, 7]
    assert scheduler.reused_tokens == 4 * 64


def test_a_follower_waits_for_a_long_prefix_and_no_longer() -> None:
    prefix = prompts(1, 150, 150)[0]
    leader, follower = row((*prefix, 1)), row((*prefix, 2))
    scheduler = scheduler_of(leader, follower, budget=40)
    steps = 0
    while follower in scheduler.waiting:
        plan = scheduler.schedule()
        compute(scheduler, plan)
        steps += 1
    assert steps == 5, "the leader needs four passes of 40 tokens for its 151"
    assert scheduler.reused_tokens == 128
    assert follower.kv.length > 128


def test_a_follower_goes_on_alone_when_its_leader_leaves() -> None:
    prefix = prompts(1, 150, 150)[0]
    leader, follower = row((*prefix, 1)), row((*prefix, 2))
    scheduler = scheduler_of(leader, follower, budget=40)
    compute(scheduler, scheduler.schedule())
    scheduler.remove(leader)
    plan = scheduler.schedule()
    assert [p.sequence for p in plan] == [follower]
    assert scheduler.reused_tokens == 32


def test_those_held_back_keep_their_seats() -> None:
    rows = [row((*TEMPLATES[0], i)) for i in range(3)] + [row(TEMPLATES[1])]
    scheduler = scheduler_of(*rows, seats=3)
    compute(scheduler, scheduler.schedule())
    assert list(scheduler.waiting) == rows[1:]
    scheduler.schedule()
    assert scheduler.running == rows[:3]
    assert list(scheduler.waiting) == rows[3:]


def test_prefixes_of_less_than_a_block_make_nobody_wait() -> None:
    rows = [row((*TEMPLATES[0][:31], i)) for i in range(4)]
    assert len(scheduler_of(*rows).schedule()) == 4
