"""Models that are benchmarked: the demo pair, a random Llama of 230M parameters, small ones."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """A random model of another architecture, float32; its logits are spread like real ones."""
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
    return BenchModel(f"{model_type}-small", folder / model_type, _SMALL["vocab_size"])
