"""Models that are benchmarked: the demo pair, random Llamas, and small ones of other kinds."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


RANDOM_CONTEXT = 2048  # tokens


def random_model(folder: Path, name: str = "llama-230m") -> BenchModel:
    """One of `RANDOM_MODELS` and its draft, created in `folder` unless they exist."""
    sizes = RANDOM_MODELS[name]
    verifier, draft = folder / name, folder / f"{name}-draft"
    _random_llama(verifier, **sizes)
    smaller = {key: sizes[key] // 4 for key in ("hidden_size", "intermediate_size")}
    _random_llama(draft, **sizes | smaller | {"num_hidden_layers": 2})
    return BenchModel(name, verifier, draft, sizes["vocab_size"])


def smallest_llama(folder: Path, model: BenchModel) -> Path:
    """A Llama of one small layer with the model's vocabulary and special tokens. It carries drafts
    that are looked up, not computed."""
    config = json.loads((model.folder / "config.json").read_text())
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    path = folder / f"{model.name}-smallest"
    _random_llama(
        path,
        vocab_size=model.vocab_size,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        **{name: config.get(name) for name in names},
    )
    return path


def _random_llama(path: Path, **sizes: int | None) -> None:
    """In bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if (path / "model.safetensors").exists():
        return
    torch.manual_seed(0)
    special = {"bos_token_id": 0, "eos_token_id": 0}
    config = LlamaConfig(
        max_position_embeddings=RANDOM_CONTEXT, tie_word_embeddings=False, **{**special, **sizes}
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)


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
