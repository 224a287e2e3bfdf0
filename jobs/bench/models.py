"""Models that are benchmarked: the demo pair and random Llamas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A verifier's folder, and that of a draft with its vocabulary."""

    name: str
    folder: Path
    draft: Path
    vocab_size: int


def demo_model() -> BenchModel:
    """The shipped pair."""
    models = Path(__file__).parents[1] / "demo" / "models"
    return BenchModel("demo", models / "verifier", models / "draft", 2048)


MADE = "llama-230m"
LLAMA_230M = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
RANDOM_CONTEXT = 2048  # tokens


def random_model(
    folder: Path, name: str = MADE, sizes: Mapping[str, int] = LLAMA_230M
) -> BenchModel:
    """A random Llama and a draft of 2 layers and a quarter of its width, created in `folder`
    unless they exist."""
    verifier, draft = folder / name, folder / f"{name}-draft"
    _random_llama(verifier, **sizes)
    smaller = {key: sizes[key] // 4 for key in ("hidden_size", "intermediate_size")}
    _random_llama(draft, **{**sizes, **smaller, "num_hidden_layers": 2})
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
