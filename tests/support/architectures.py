"""Tiny random models of every supported architecture, with what sets it apart switched on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 199
WINDOW = 16  # tokens; shorter than most sequences of the tests

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "bos_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": VOCAB - 1,
}
_BODY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
_GROUPED = _BODY | {"num_key_value_heads": 2}
_WINDOW_IN_LAYER_1 = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_GEMMA = _GROUPED | {
    "num_hidden_layers": 3,
    "head_dim": 24,  # not hidden_size / num_attention_heads
    "query_pre_attn_scalar": 20,  # not head_dim
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": WINDOW,
    "tie_word_embeddings": False,  # tied and random, it would repeat each token for ever
}
_EXPERTS = {"num_experts_per_tok": 2, "sliding_window": WINDOW}

CONFIGS: dict[str, dict[str, Any]] = {
    "gemma2": _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 8.0},
    "gemma3_text": _GEMMA,
    "gpt2": {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "scale_attn_by_inverse_layer_idx": True,
    },
    "gpt_neox": _BODY,
    "llama": _GROUPED,
    "mistral": _GROUPED | {"sliding_window": WINDOW},
    "mixtral": _GROUPED | _EXPERTS | {"num_local_experts": 5},
    "olmo2": _GROUPED,
    "phi3": _GROUPED
    | {
        "sliding_window": WINDOW,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    },
    "qwen2": _GROUPED | _WINDOW_IN_LAYER_1,
    "qwen3": _GROUPED | _WINDOW_IN_LAYER_1 | {"head_dim": 24},
    "qwen3_moe": _GROUPED
    | _EXPERTS
    | {
        "use_sliding_window": True,
        "head_dim": 24,
        "num_experts": 5,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
}


def tiny_model(model_type: str, path: Path) -> Path:
    """Write a random model to `path`; no parameter is left at its usual start."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.for_model(model_type, **_COMMON, **CONFIGS[model_type])
    model: Any = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    tables = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:  # norms and biases
                parameter.add_(noise, alpha=0.1)
            else:
                std = 0.3 if id(parameter) in tables else 2 * parameter.shape[-1] ** -0.5
                parameter.copy_(noise * std)
    model.save_pretrained(path)
    return path
