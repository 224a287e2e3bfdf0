"""OpenVINO GenAI's continuous batching on the CPU. Run by `serve.py`, in OpenVINO's interpreter.

Weights, arithmetic and KV cache are all of the dtype asked for; nothing is quantised. Options:
`lookup`, the tokens drafted per step by prompt lookup (none without it).
"""

from __future__ import annotations

import importlib.metadata
import tempfile
from pathlib import Path
from typing import Any

PRECISION = {"bfloat16": "bf16", "float32": "f32"}
CACHE_GIB = 2


def convert(source: Path, target: Path, dtype: str) -> None:
    """Export a Hugging Face folder as OpenVINO's IR, its weights in `dtype`."""
    import torch
    from optimum.exporters.openvino import main_export
    from transformers import AutoModelForCausalLM

    # The exporter keeps the weights' dtype, so the weights get the right one first.
    with tempfile.TemporaryDirectory() as folder:
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
        model.save_pretrained(folder)
        main_export(folder, target, task="text-generation-with-past", stateful=True)


class Engine:
    """One pipeline; the batch size is whatever `generate` is given."""

    def __init__(self, model: Path, dtype: str, threads: int, options: dict[str, Any]) -> None:
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs = 256
        scheduler.max_num_batched_tokens = 2048
        scheduler.dynamic_split_fuse = True
        # The same prompts are completed again and again: each time in full.
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = CACHE_GIB
        self.lookup = int(options.get("lookup", 0))
        properties: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "INFERENCE_PRECISION_HINT": PRECISION[dtype],
            "KV_CACHE_PRECISION": PRECISION[dtype],
        }
        if self.lookup:
            properties["prompt_lookup"] = True
        self.pipeline = genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", properties)

    def versions(self) -> dict[str, str]:
        names = ("openvino", "openvino-genai")
        return {name: importlib.metadata.version(name) for name in names}

    def prepare(self, sequences: int, tokens: int) -> None:
        """The pipeline takes any batch within its cache."""

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        if self.lookup:
            config.num_assistant_tokens = self.lookup
            config.max_ngram_size = 3
        ids = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = self.pipeline.generate(ids, [config] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]
