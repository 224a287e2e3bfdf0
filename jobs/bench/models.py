"""The models that are benchmarked: the demo pair, and random Llamas."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A verifier's folder and prompts of 64 tokens for it."""

    name: str
    folder: Path
    vocab_size: int

    def prompts(self, count: int) -> list[list[int]]:
        """Fixed random prompts; the first `count` of one list."""
        rng = random.Random(0)
        return [
            [rng.randrange(3, self.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)
        ]


def demo_model() -> BenchModel:
    """The shipped verifier."""
    return BenchModel("demo", Path(__file__).parents[1] / "demo" / "models" / "verifier", 2048)


# Llamas of 230M and 1.2G parameters.
RANDOM_MODELS: dict[str, dict[str, int]] = {
    "llama-230m": {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    "llama-1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}


def random_model(folder: Path, name: str = "llama-230m") -> BenchModel:
    """One of `RANDOM_MODELS` in bfloat16; made in `folder` unless it is there."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path, sizes = folder / name, RANDOM_MODELS[name]
    if not (path / "model.safetensors").exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
            **sizes,
        )
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return BenchModel(name, path, sizes["vocab_size"])
