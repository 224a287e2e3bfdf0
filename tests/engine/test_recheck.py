"""A second look finds nothing where bits are kept, and finds what was planted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine.decoding import prompts, runner_of
from engine.faulty import FaultyDecoder

from specbatch.kernels.counters.reference import gumbel
from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.pipeline.engines.exact.draft_model import DraftModelProposer
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.exact.host import EngineHost
from specbatch.pipeline.engines.exact.model.batch import Chunk
from specbatch.pipeline.engines.exact.model.runner import ModelRunner
from specbatch.pipeline.engines.exact.recheck import Rechecker
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.engines.recheck_sample import ONE_IN
from specbatch.pipeline.engines.state.kv_blocks import KvState
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.schemas.records import Recheck, SamplingParams, Verification
from specbatch.schemas.spec import EngineSpec
from support.architectures import tiny_model
from support.engines import loaded
from support.models import TinyPair

pytestmark = pytest.mark.pipeline  # runs models

GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
SHAPED = SamplingParams(
    max_tokens=30, temperature=0.9, top_p=0.9, min_tokens=5, repetition_penalty=1.3,
    frequency_penalty=0.4, logit_bias=((7, 2.0),), bad_words=((3, 4), (9,)),
)  # fmt: skip
LONG = SamplingParams(max_tokens=600, temperature=1.0, ignore_eos=True)  # several pieces


@pytest.fixture
def runner(tiny_pair: TinyPair) -> ModelRunner:
    return runner_of(loaded(tiny_pair.verifier, "float32"), 256)


def run(
    runner: ModelRunner, requests: list[Request], one_in: int = 1, again: ModelRunner | None = None
) -> tuple[Engine, list[Completion]]:
    engine = Engine(runner, rechecker=Rechecker(again or runner, one_in))
    for request in requests:
        engine.add(request)
    done: list[Completion] = []
    while not engine.idle:
        done += engine.step()
    return engine, done


@pytest.mark.parametrize("params", [GREEDY, SHAPED, LONG], ids=["greedy", "shaped", "long"])
def test_nothing_differs_where_bits_do_not_depend_on_the_batch(
    runner: ModelRunner, params: SamplingParams
) -> None:
    engine, done = run(
        runner, [Request(str(i), p, params, seed=i) for i, p in enumerate(prompts(6, longest=300))]
    )
    assert engine.stats.checked_tokens == engine.stats.generated_tokens > 0
    assert engine.stats.differing_tokens == 0
    assert engine.stats.largest_margin == 0
    assert [c.recheck.tokens for c in done] == [len(c.token_ids) for c in done]
    assert runner.blocks.free_blocks == runner.blocks.num_blocks - 1


def test_a_second_look_that_raises_costs_nothing_but_itself(
    runner: ModelRunner, tiny_pair: TinyPair
) -> None:
    asked = [Request(str(i), p, GREEDY, seed=i) for i, p in enumerate(prompts(6))]
    _, expected = run(runner, asked)
    for error in (RuntimeError("a hiccup"), MemoryError("none left")):
        broken = runner_of(loaded(tiny_pair.verifier, "float32"), 256)
        broken._decoder = FaultyDecoder(broken._decoder, lambda _, error=error: error)
        engine, done = run(runner, asked, again=broken)
        assert [c.token_ids for c in done] == [c.token_ids for c in expected]
        assert {c.recheck for c in done} == {Recheck()}
        assert engine.stats.checked_tokens == 0
        for one in (runner, broken):
            assert one.blocks.free_blocks == one.blocks.num_blocks - 1


def test_a_device_lost_in_a_second_look_is_lost(runner: ModelRunner, tiny_pair: TinyPair) -> None:
    broken = runner_of(loaded(tiny_pair.verifier, "float32"), 256)
    gone = torch.AcceleratorError("CUDA error: unspecified launch failure")
    broken._decoder = FaultyDecoder(broken._decoder, lambda _: gone)
    with pytest.raises(torch.AcceleratorError):
        run(runner, [Request("r", (1, 2), GREEDY, seed=0)], again=broken)


def last_logits(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    kv = KvState()
    runner.blocks.grow(kv, len(tokens))
    logits = runner.forward([Chunk(kv, tokens, 1)])[0]
    runner.blocks.release(kv)
    return logits


def test_a_token_the_verifier_would_not_write_is_found_with_its_margin(
    runner: ModelRunner,
) -> None:
    request = Request("r", prompts(1)[0], GREEDY, seed=0)
    _, (done,) = run(runner, [request])
    sequence = Sequence(request, frozenset(), 2048)
    sequence.tokens += done.token_ids
    logits = last_logits(runner, sequence.tokens[:-1])
    order = logits.argsort(descending=True).tolist()
    assert order[0] == sequence.tokens[-1]
    sequence.tokens[-1] = order[3]
    found = Rechecker(runner).check(sequence)
    assert found is not None
    assert (found.tokens, found.differing) == (20, 1)
    assert found.largest_margin == pytest.approx(float(logits[order[0]] - logits[order[3]]))


def test_a_sequence_for_which_there_are_no_blocks_is_not_looked_at(tiny_pair: TinyPair) -> None:
    runner = runner_of(loaded(tiny_pair.verifier, "float32"), 3)
    sequence = Sequence(Request("r", tuple(range(60)), GREEDY, seed=0), frozenset(), 2048)
    sequence.tokens += [1] * 30
    assert Rechecker(runner).check(sequence) is None
    assert runner.blocks.free_blocks == 2


def test_about_one_in_64_is_looked_at_and_always_the_same_ones(runner: ModelRunner) -> None:
    requests = [Request(f"job/{i}/0", (1,), GREEDY, seed=0) for i in range(64 * ONE_IN)]
    chosen = [Rechecker(runner).wants(r) for r in requests]
    assert 40 <= sum(chosen) <= 90
    assert chosen == [Rechecker(runner).wants(r) for r in requests]


def test_what_was_not_chosen_is_not_looked_at(runner: ModelRunner) -> None:
    requests = [Request(str(i), p, GREEDY, seed=i) for i, p in enumerate(prompts(8))]
    engine, done = run(runner, requests, one_in=3)
    wanted = {r.request_id for r in requests if Rechecker(runner, 3).wants(r)}
    assert 0 < len(wanted) < 8
    assert {c.request_id for c in done if c.recheck != Recheck()} == wanted
    assert engine.stats.checked_tokens == 20 * len(wanted)


@pytest.mark.parametrize(("exactness", "looks"), [("bitwise", False), ("fast", True)])
def test_only_engines_that_keep_no_bits_check_again(
    runner: ModelRunner, tmp_path: Path, exactness: str, looks: bool
) -> None:
    verifier = inspect_model(str(tiny_model("gemma2", tmp_path)))
    host = EngineHost(verifier, None, 64, 2048, 1 << 20)
    service = host.service(EngineSpec.model_validate({"exactness": exactness, "dtype": "float32"}))
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    asked = [Request(f"job/{i}/0", (1, 2, 3), params, seed=i) for i in range(256)]
    service.submit("job", asked).wait(60.0)
    chosen = [r for r in asked if Rechecker(runner).wants(r)]
    assert len(chosen) > 0
    assert service.stats.checked_tokens == (2 * len(chosen) if looks else 0)
    host.close()


def test_what_top_k_dropped_by_a_hair_is_a_near_thing(runner: ModelRunner) -> None:
    """The noise favours the third token, top-k drops it: the margin is its distance to the second,
    whatever lies between its score and that of the one that is decided."""
    prompt = prompts(1)[0]
    logits = last_logits(runner, list(prompt)) / 0.5
    _, second, third = logits.argsort(descending=True)[:3].tolist()
    seed = next(
        seed
        for seed in range(1000)
        if int((logits + gumbel(torch.tensor([[seed, 0]]), len(logits))[0]).argmax()) == third
    )
    params = SamplingParams(max_tokens=1, temperature=0.5, top_k=2, ignore_eos=True)
    sequence = Sequence(Request("r", prompt, params, seed=seed), frozenset(), 2048)
    sequence.tokens.append(third)
    found = Rechecker(runner).differences(sequence)
    assert found is not None
    (difference,) = found
    assert (difference.position, difference.written) == (0, third)
    assert difference.margin == pytest.approx(0.5 * float(logits[second] - logits[third]))


def test_a_ratio_test_is_not_held_to_the_coupled_sample(tiny_pair: TinyPair) -> None:
    drafting = runner_of(loaded(tiny_pair.draft, "float32"), 256)
    deciding = runner_of(loaded(tiny_pair.verifier, "float32"), 256)
    engine = Engine(deciding, (DraftModelProposer(drafting),), rechecker=Rechecker(deciding, 1))
    params = SamplingParams(max_tokens=20, temperature=0.9)
    for i, prompt in enumerate(prompts(4)):
        how = Verification.REJECTION if i % 2 else Verification.COUPLED
        engine.add(Request(str(i), prompt, params, seed=i, depth=3, verification=how))
    done = {}
    while not engine.idle:
        done |= {c.request_id: c for c in engine.step()}
    assert [bool(done[str(i)].recheck.tokens) for i in range(4)] == [True, False, True, False]
    assert engine.stats.differing_tokens == 0
