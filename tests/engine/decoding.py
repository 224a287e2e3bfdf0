"""Engines whose books can be read, prompts, and what a completion must be."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from specbatch.kernels.decoder.contract import BLOCK_SIZE
from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.pipeline.engines.exact.draft_model import DraftModelProposer
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.exact.model.loaded_model import LoadedModel
from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.exact.model.runner import ModelRunner
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.engines.observing import Observer
from specbatch.pipeline.engines.proposers.block import BlockProposer
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.state.sequence import Sequence as Row
from specbatch.pipeline.policy.tuning import PASSES_AT_ONCE
from specbatch.pipeline.stages.text_stop import TextStop
from specbatch.schemas.records import FinishReason, Origin, SamplingParams
from support.engines import loaded
from support.models import byte_tokenizer

VOCAB = 300
AMPLE_BLOCKS = 1024


class WatchedBlockProposer(BlockProposer):
    """Sees every preemption: a sequence is forgotten that is not finished."""

    def __init__(self) -> None:
        super().__init__()
        self.preempted = 0

    def forget(self, sequence: Row) -> None:
        self.preempted += sequence.finish_reason is None
        super().forget(sequence)


@dataclass
class Bench:
    """An engine, and the parts of it that tests look at."""

    engine: Engine
    runners: list[ModelRunner]
    blocks: WatchedBlockProposer
    finished: dict[str, Completion] = field(default_factory=dict)

    def add(self, *requests: Request) -> Bench:
        for request in requests:
            self.engine.add(request)
        return self

    def step(self) -> None:
        self.keep(self.engine.step())

    def keep(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            assert completion.request_id not in self.finished, "finished twice"
            self.finished[completion.request_id] = completion

    def run(self) -> dict[str, Completion]:
        for _ in range(20_000):
            if self.engine.idle:
                return self.finished
            self.step()
        raise AssertionError("the engine does not come to an end")

    def assert_all_blocks_are_free(self) -> None:
        for runner in self.runners:
            assert runner.blocks.free_blocks == runner.blocks.num_blocks - 1


@lru_cache(maxsize=4)
def _torch_model(folder: Path, dtype: str) -> LoadedModel:
    return load_model(inspect_model(str(folder)), dtype, native=False)


def runner_of(model: LoadedModel, num_blocks: int, share_prefixes: bool = True) -> ModelRunner:
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.dtype.itemsize
    runner = ModelRunner(model, num_blocks * BLOCK_SIZE * token_bytes, share_prefixes)
    assert runner.blocks.num_blocks == num_blocks
    return runner


def bench(
    verifier: Path,
    proposer: Path | None = None,
    *,
    others: Sequence[Proposer] = (),
    dtype: str = "float32",
    native: bool = True,
    max_sequences: int = 64,
    max_batch_tokens: int = 2048,
    num_blocks: int = AMPLE_BLOCKS,
    draft_blocks: int | None = None,
    share_prefixes: bool = True,
    blocks: WatchedBlockProposer | None = None,
    observer: Observer | None = None,
    drift_every: int = 0,
    passes_at_once: int = PASSES_AT_ONCE,
) -> Bench:
    model = loaded(verifier, dtype) if native else _torch_model(verifier, dtype)
    runners = [runner_of(model, num_blocks, share_prefixes)]
    watched = blocks or WatchedBlockProposer()
    proposers: list[Proposer] = [watched, *others]
    if proposer is not None:
        drafting = runner_of(loaded(proposer, dtype), draft_blocks or num_blocks, share_prefixes)
        runners.append(drafting)
        proposers.append(DraftModelProposer(runners[1]))
    engine = Engine(
        runners[0],
        tuple(proposers),
        max_sequences,
        max_batch_tokens,
        observer=observer,
        drift_every=drift_every,
        passes_at_once=passes_at_once,
    )
    return Bench(engine, runners, watched)


def prompts(
    count: int, shortest: int = 1, longest: int = 70, seed: int = 0
) -> list[tuple[int, ...]]:
    generator = random.Random(seed)
    return [
        tuple(generator.randrange(256) for _ in range(generator.randint(shortest, longest)))
        for _ in range(count)
    ]


@lru_cache(maxsize=4096)
def alone(
    verifier: Path, prompt: tuple[int, ...], params: SamplingParams, seed: int, dtype: str
) -> Completion:
    """What one request gives by itself, one token at a time, with nothing shared."""
    one = _engine_of_one(verifier, dtype)
    one.finished.clear()
    request = Request("alone", prompt, params, seed, depth=0, watch_text=watch_text(params))
    return one.add(request).run()["alone"]


def watch_text(params: SamplingParams) -> Callable[[], Callable[[int], bool]] | None:
    """What notices the stop strings, with the text that the tiny models' tokenizer makes."""
    if not params.stop:
        return None

    def decode(ids: Sequence[int]) -> str:
        return str(_tokenizer().decode(list(ids), skip_special_tokens=True))

    return lambda: TextStop(decode, params.stop, params.min_tokens)


@cache
def _tokenizer() -> Any:
    return byte_tokenizer(VOCAB).backend_tokenizer


@lru_cache(maxsize=4)
def _engine_of_one(verifier: Path, dtype: str) -> Bench:
    return bench(verifier, dtype=dtype, max_sequences=1, share_prefixes=False, passes_at_once=1)


def baseline_of(verifier: Path, dtype: str = "float32") -> Callable[[Request], Completion]:
    return lambda r: alone(verifier, r.prompt_ids, r.params, r.seed, dtype)


def assert_same(got: Completion, expected: Completion) -> None:
    """Everything that depends on the request alone, to the last bit."""
    assert got.token_ids == expected.token_ids
    assert got.logprobs == expected.logprobs
    assert got.top_logprobs == expected.top_logprobs
    assert got.finish_reason == expected.finish_reason
    assert_counts_add_up(got)


def assert_counts_add_up(completion: Completion) -> None:
    """Each pass emits what it accepted and one token more; only a stop inside a draft cuts."""
    emitted = len(completion.token_ids)
    origins = completion.origins
    assert len(origins) == len(completion.logprobs) == emitted
    assert completion.top_logprobs is None or len(completion.top_logprobs) == emitted
    cut = completion.accepted + completion.verifier_passes - emitted
    if completion.finish_reason is FinishReason.STOP:
        assert 0 <= cut <= max(len(completion.proposed_at_depth), 0)
    else:
        assert cut == 0
    own = sum(origin != Origin.ACCEPTED for origin in origins)
    assert own == completion.verifier_passes - (cut > 0)
    assert completion.proposed == sum(completion.proposed_at_depth)
    assert completion.accepted == sum(completion.accepted_at_depth)
    assert completion.accepted <= completion.proposed
    assert list(completion.accepted_at_depth) == sorted(completion.accepted_at_depth, reverse=True)
    if not completion.proposed:
        assert set(origins) <= {Origin.PLAIN}
