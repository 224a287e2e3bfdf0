"""The models that are benchmarked: the demo pair, and a random Llama of 230M parameters."""

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


def random_model(folder: Path) -> BenchModel:
    """Hidden 1024, 16 layers, vocabulary 32000, bfloat16; made in `folder` unless it is there."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = folder / "llama-230m"
    if not (path / "model.safetensors").exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=32000,
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=4,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return BenchModel("llama-230m", path, 32000)
