"""`make bench-exactness`: what `bitwise` costs on the torch path, and what `fast` changes.

The native path has nothing to drop: it adds in one order whatever the batch. On the torch path both
modes complete the same prompts greedily at depth 0, in turns; a ratio is of two neighbouring runs.
The texts that `fast` writes in a batch, with and without drafts, are then compared with those that
it writes for each prompt alone at depth 0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specbatch.benchmarks.contenders import random_prompts
from specbatch.benchmarks.engine import RESULTS
from specbatch.jobs.bench.contenders import ReplayProposer
from specbatch.jobs.bench.machine import machine
from specbatch.jobs.bench.models import BenchModel, demo_model
from specbatch.pipeline.engines.contract import EngineStats, Request
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.exact.model.batch import Chunk
from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.exact.model.runner import ModelRunner
from specbatch.pipeline.engines.exact.recheck import Rechecker
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.engines.state.kv_blocks import KvState
from specbatch.schemas.records import SamplingParams

MODES = ("bitwise", "fast")
NEW_TOKENS = 64
COMPARED = 32  # prompts
DEPTH, ACCEPTANCE = 4, 0.7  # of the drafts that `fast` is compared with
Texts = list[list[int]]
_SMALL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}
_OF_TYPE: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 128},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["demo", "gemma3_text", "qwen3_moe"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--n", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            model = demo_model() if name == "demo" else small_model(name, Path(folder))
            for dtype in arguments.dtypes:
                rows.append(measure(model, dtype, arguments.n, arguments.runs))
                print(json.dumps(rows[-1]), flush=True)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "exactness-torch-path.json"
    path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    print(f"written to {path}")


def measure(model: BenchModel, dtype: str, sizes: list[int], runs: int) -> dict[str, Any]:
    """Cost of `bitwise` at each number of prompts, and differences of `fast`."""
    modes = {mode: Mode(model, dtype, mode) for mode in MODES}
    tiles = modes["bitwise"].tiles
    row: dict[str, Any] = {"model": model.name, "dtype": dtype, "row_tiles": tiles, "cost": []}
    for n in sizes:
        seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
        for run in range(runs + 1):
            for name, mode in modes.items():
                begun = time.perf_counter()
                mode.complete(random_prompts(model, n))
                if run:  # the first is to warm up
                    seconds[name].append(time.perf_counter() - begun)
        ratios = [b / f for b, f in zip(*(seconds[m] for m in MODES), strict=True)]
        row["cost"].append(
            {
                "n": n,
                "bitwise_over_fast_time": round(statistics.median(ratios), 3),
                "ratios": [round(r, 3) for r in ratios],
                "tokens_per_sec": {
                    mode: round(n * NEW_TOKENS / statistics.median(seconds[mode]), 1)
                    for mode in MODES
                },
            }
        )
    row["fast_differs"] = differences(modes["fast"], random_prompts(model, COMPARED))
    return row


class Mode:
    """One model in one exactness on the torch path."""

    def __init__(self, model: BenchModel, dtype: str, exactness: str) -> None:
        loaded = load_model(inspect_model(str(model.folder)), dtype, exactness, native=False)
        self.tiles = None if loaded.tiles is None else str(loaded.tiles)
        self.vocab_size = model.vocab_size
        self.runner = ModelRunner(loaded, kv_cache_bytes=256 << 20, share_prefixes=False)
        self.stats = EngineStats()

    def complete(
        self, prompts: Texts, known: Texts | None = None, rechecker: Rechecker | None = None
    ) -> Texts:
        """All prompts at once; with drafts of `known` texts, spoilt, where there are any."""
        proposers: tuple[ReplayProposer, ...] = ()
        if known is not None:
            outputs = {str(i): text for i, text in enumerate(known)}
            proposers = (ReplayProposer(outputs, ACCEPTANCE, self.vocab_size),)
        engine = Engine(self.runner, proposers, len(prompts), 4096, rechecker)
        params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            depth = 0 if known is None else DEPTH
            engine.add(Request(str(i), tuple(prompt), params, seed=i, depth=depth))
        done: dict[str, list[int]] = {}
        while not engine.idle:
            done.update({c.request_id: list(c.token_ids) for c in engine.step()})
        self.stats = engine.stats
        return [done[str(i)] for i in range(len(prompts))]

    def margin_alone(self, prompt: list[int], text: list[int]) -> float:
        """Distance of the two highest logits behind `text`, decoded alone, token by token."""
        kv = KvState()
        self.runner.blocks.grow(kv, len(prompt) + len(text))
        logits = self.runner.forward([Chunk(kv, prompt, 1)])
        for token in text:
            logits = self.runner.forward([Chunk(kv, [token], 1)])
        self.runner.blocks.release(kv)
        first, second = logits[0].topk(2).values.tolist()
        return float(first - second)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a text leaves the one written alone, and by how little it was decided there."""

    position: int
    margin: float


def differences(mode: Mode, prompts: Texts) -> dict[str, Any]:
    """Texts of the batch against those of each prompt alone; and what the second look says."""
    alone = [mode.complete([prompt])[0] for prompt in prompts]
    batches = {
        "depth 0": mode.complete(prompts),
        f"drafts of depth {DEPTH}": mode.complete(prompts, known=alone),
    }
    found: dict[str, Any] = {"completions": len(prompts), "tokens": len(prompts) * NEW_TOKENS}
    for name, texts in batches.items():
        leaving = [
            Difference(at, mode.margin_alone(prompt, reference[:at]))
            for prompt, text, reference in zip(prompts, texts, alone, strict=True)
            if (at := first_difference(text, reference)) is not None
        ]
        found[name] = {
            "differing_completions": len(leaving),
            "first_position": spread([d.position for d in leaving]),
            "margin": spread([d.margin for d in leaving]),
        }
    mode.complete(prompts, rechecker=Rechecker(mode.runner, one_in=1))
    found["second look at every completion"] = {
        "tokens": mode.stats.checked_tokens,
        "differing": mode.stats.differing_tokens,
        "largest_margin": mode.stats.largest_margin,
    }
    return found


def first_difference(text: list[int], reference: list[int]) -> int | None:
    pairs = enumerate(zip(text, reference, strict=True))
    return next((i for i, (a, b) in pairs if a != b), None)


def spread(values: list[int] | list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def small_model(model_type: str, folder: Path) -> BenchModel:
    """A random model of another architecture, float32; its logits are spread like real ones.

    It has no draft but itself.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.for_model(model_type, **_SMALL, **_OF_TYPE[model_type])
    model: Any = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                std = parameter.shape[-1] ** -0.5
                parameter.normal_(0.0, std, generator=generator)
        model.get_output_embeddings().weight.mul_(4.0)
    model.save_pretrained(folder / model_type)
    path = folder / model_type
    return BenchModel(f"{model_type}-small", path, path, _SMALL["vocab_size"])


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
