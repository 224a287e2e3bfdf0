"""The models that are benchmarked: the demo pair, and a random Llama of 230M parameters."""

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


def random_model(folder: Path) -> BenchModel:
    """Hidden 1024, 16 layers, and a draft of 2 with hidden 256; made in `folder` unless there."""
    verifier, draft = folder / "llama-230m", folder / "llama-230m-draft"
    _random_llama(verifier, hidden_size=1024, intermediate_size=2816, num_hidden_layers=16)
    _random_llama(draft, hidden_size=256, intermediate_size=704, num_hidden_layers=2)
    return BenchModel("llama-230m", verifier, draft, 32000)


def _random_llama(path: Path, **sizes: int) -> None:
    """16 attention heads on 4, vocabulary 32000, bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if (path / "model.safetensors").exists():
        return
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        **sizes,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
