"""The models that are benchmarked: the demo pair, and random Llamas."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A verifier's folder, that of a draft with its vocabulary, and prompts of 64 tokens."""

    name: str
    folder: Path
    draft: Path
    vocab_size: int

    def prompts(self, count: int) -> list[list[int]]:
        """Fixed random prompts; the first `count` of one list."""
        rng = random.Random(0)
        return [
            [rng.randrange(3, self.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)
        ]


def demo_model() -> BenchModel:
    """The shipped pair."""
    models = Path(__file__).parents[1] / "demo" / "models"
    return BenchModel("demo", models / "verifier", models / "draft", 2048)


# Llamas of 230M and 1.2G parameters, with drafts of 2 layers and a quarter of the width.
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
    """One of `RANDOM_MODELS` and its draft; made in `folder` unless they are there."""
    sizes = RANDOM_MODELS[name]
    verifier, draft = folder / name, folder / f"{name}-draft"
    _random_llama(verifier, **sizes)
    smaller = {key: sizes[key] // 4 for key in ("hidden_size", "intermediate_size")}
    _random_llama(draft, **sizes | smaller | {"num_hidden_layers": 2})
    return BenchModel(name, verifier, draft, sizes["vocab_size"])


def _random_llama(path: Path, **sizes: int) -> None:
    """In bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if (path / "model.safetensors").exists():
        return
    torch.manual_seed(0)
    config = LlamaConfig(
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        **sizes,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
