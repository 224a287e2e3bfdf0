"""Engines for tests: any proposer, any concurrency, and what came out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.pipeline.engines.exact.draft_model import DraftModelProposer
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.exact.model.loaded_model import LoadedModel
from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.exact.model.runner import ModelRunner
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.engines.proposers.block import BlockProposer
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.schemas.records import SamplingParams


@lru_cache(maxsize=8)
def loaded(folder: Path, dtype: str, native: bool = True) -> LoadedModel:
    return load_model(inspect_model(str(folder)), dtype, native=native)


def make_engine(
    verifier: Path,
    proposer: Path | None = None,
    *,
    dtype: str = "float32",
    max_sequences: int = 64,
    max_batch_tokens: int = 2048,
    kv_cache_bytes: int = 64 << 20,
    native: bool = True,
) -> Engine:
    """An engine with the block proposer, and a draft model if one is given.

    `native` False takes the torch path, which is what other architectures and devices run.
    """
    proposers: list[Proposer] = [BlockProposer()]
    if proposer is not None:
        proposers.append(
            DraftModelProposer(ModelRunner(loaded(proposer, dtype, native), kv_cache_bytes))
        )
    runner = ModelRunner(loaded(verifier, dtype, native), kv_cache_bytes)
    return Engine(runner, tuple(proposers), max_sequences, max_batch_tokens)


def engine_of(model: LoadedModel, kv_cache_bytes: int = 64 << 20) -> Engine:
    """An engine without proposers, of a model that was loaded in its own way."""
    return Engine(ModelRunner(model, kv_cache_bytes), (), 64, 2048)


def complete(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    depth: int | None = None,
    drafts: Sequence[Sequence[int]] | None = None,
) -> list[Completion]:
    """Complete all prompts (seeds 1000, 1001, …); completions in their order."""
    for i, prompt in enumerate(prompts):
        block = tuple(drafts[i]) if drafts else ()
        engine.add(Request(str(i), tuple(prompt), params, 1000 + i, draft_ids=block, depth=depth))
    done = {}
    while not engine.idle:
        done.update({c.request_id: c for c in engine.step()})
    return [done[str(i)] for i in range(len(prompts))]


def decided(completions: Sequence[Completion]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """What must not depend on anything but the request: tokens and their log-probabilities."""
    return [(c.token_ids, c.logprobs) for c in completions]
