"""Who is timed: transformers' own paths, and this engine at depth 0 and with replayed drafts.

Every contender completes the same prompts greedily with exactly `NEW_TOKENS` tokens each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from specbatch.jobs.bench.models import BenchModel
from specbatch.jobs.bench.replay import ReplayProposer
from specbatch.pipeline.engine.device import DeviceOptions, capture_for
from specbatch.pipeline.engine.engine import Engine, EngineStats
from specbatch.pipeline.engine.loader import load_model
from specbatch.pipeline.engine.model_folder import inspect_model
from specbatch.pipeline.engine.runner import ModelRunner
from specbatch.pipeline.engine.sequence import Request
from specbatch.schemas.records import SamplingParams

NEW_TOKENS = 128
Outputs = list[list[int]]
Complete = Callable[[list[list[int]]], Outputs]


@dataclass(slots=True)
class Contender:
    """`complete` maps prompts to their new tokens; `stats` are this engine's, after a run."""

    name: str
    complete: Complete
    only_n: int | None = None
    stats: EngineStats | None = None


class Ours:
    """This engine over one model: weights are packed once, an engine is made per run."""

    def __init__(
        self,
        model: BenchModel,
        dtype: str,
        device: str = "cpu",
        exactness: str = "bitwise",
        graphs: bool = True,
    ) -> None:
        self.vocab_size = model.vocab_size
        loaded = load_model(inspect_model(str(model.folder)), dtype, exactness, device)
        # The same prompts are completed again and again: each time in full.
        self.runner = ModelRunner(
            loaded,
            kv_cache_bytes=1 << 30,
            share_prefixes=False,
            capture=capture_for(loaded, DeviceOptions(device, graphs)),
        )
        self.known: dict[str, list[int]] = {}
        self.stats = EngineStats()

    def complete(
        self, prompts: list[list[int]], depth: int | None = 0, acceptance: float | None = None
    ) -> Outputs:
        proposers: tuple[ReplayProposer, ...] = ()
        if acceptance is not None:
            proposers = (ReplayProposer(self.known, acceptance, self.vocab_size),)
        engine = Engine(self.runner, proposers, max_sequences=len(prompts), max_batch_tokens=4096)
        params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            engine.add(Request(str(i), tuple(prompt), params, seed=i, depth=depth))
        done: dict[str, list[int]] = {}
        while not engine.idle:
            done.update({c.request_id: list(c.token_ids) for c in engine.step()})
        self.stats = engine.stats
        if acceptance is None:
            self.known = self.known | done
        return [done[str(i)] for i in range(len(prompts))]


def transformers_contenders(
    model: BenchModel, dtype: torch.dtype, device: str = "cpu"
) -> list[Contender]:
    """`generate`, `generate_batch` and assisted generation (one prompt, the model's own twin)."""
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    module: Any = AutoModelForCausalLM.from_pretrained(model.folder, dtype=dtype).to(device).eval()
    fixed = {
        "do_sample": False,
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
        "eos_token_id": None,
        "pad_token_id": 0,
    }

    def generate(prompts: list[list[int]], **more: Any) -> Outputs:
        ids = torch.tensor(prompts, device=device)
        with torch.inference_mode():
            out = module.generate(ids, attention_mask=torch.ones_like(ids), **fixed, **more)
        return list(out[:, ids.shape[1] :].tolist())

    def generate_batch(prompts: list[list[int]]) -> Outputs:
        tokens = len(prompts[0]) + NEW_TOKENS
        batching = ContinuousBatchingConfig(
            page_size=32,
            num_blocks=(tokens // 32 + 2) * len(prompts) + 8,
            max_batch_tokens=max(512, 2 * len(prompts)),
            allow_block_sharing=False,
        )
        config = GenerationConfig(
            do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=-1, pad_token_id=0,
            use_cuda_graph=False,
        )  # fmt: skip
        out = module.generate_batch(
            prompts,
            generation_config=config,
            continuous_batching_config=batching,
            progress_bar=False,
        )
        return [list(r.generated_tokens) for r in out.values()]

    return [
        Contender("generate", generate),
        Contender("generate_batch", generate_batch),
        Contender("prompt_lookup", lambda p: generate(p, prompt_lookup_num_tokens=4), only_n=1),
    ]
