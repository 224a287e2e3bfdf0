"""Which models run as one native decoder pass, and their weights in its terms."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import torch
from torch import Tensor

from specbatch.kernels.decoder import cpu
from specbatch.kernels.decoder.contract import DecoderShape, DecoderWeights, LayerWeights
from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.engines.exact.model import rotary
from specbatch.pipeline.engines.models.model_folder import NATIVE_MODEL_TYPES


class NotNativeError(Exception):
    """The model takes the torch path; the message says why."""


# What `config.json` must say itself; for what it leaves out, transformers has defaults per family.
_SAID = (
    *("hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings"),
    *("num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps"),
    *("tie_word_embeddings", "vocab_size"),
)
_ROPE = {
    "default": ("rope_theta",),
    "llama3": (
        *("rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
}


def config_of(folder: Path) -> Any:
    """The model's config, as transformers would read it.

    Where the file says all that the native pass asks for, it is taken as it is: importing
    transformers and its class takes seconds of processor time. Raises what `AutoConfig` raises.
    """
    try:
        said = orjson.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        said = None  # transformers says what is wrong
    if isinstance(said, dict) and (rope := _rope_said(said)) and _is_whole(said):
        if said["model_type"] in ("qwen2", "qwen3"):
            said["sliding_window"] = None  # it is not used, or the config is not whole
        return SimpleNamespace(**said | {"rope_parameters": rope})
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(folder), trust_remote_code=False)


def _is_whole(said: dict[str, Any]) -> bool:
    """Whether no default of the family is needed."""
    family = said.get("model_type")
    return (
        family in NATIVE_MODEL_TYPES
        and all(said.get(name) is not None for name in _SAID)
        and isinstance(said["rms_norm_eps"], float | int)
        and "eos_token_id" in said
        and not said.get("use_sliding_window")
        and (family != "mistral" or "sliding_window" in said)
        and (family != "qwen3" or said.get("head_dim") is not None)
        and "partial_rotary_factor" not in said
    )


def _rope_said(said: dict[str, Any]) -> dict[str, Any] | None:
    """The rope parameters in today's form, if they need no other reading."""
    rope = said.get("rope_parameters")
    if rope is None and "rope_theta" in said:  # as transformers 4 wrote them
        rope = said.get("rope_scaling") or {"rope_type": "default"}
        rope = isinstance(rope, dict) and {"rope_theta": said["rope_theta"]} | rope
    if not isinstance(rope, dict) or str(rope.get("rope_type")) not in _ROPE:
        return None
    wanted = _ROPE[rope["rope_type"]]
    return rope if all(isinstance(rope.get(name), int | float) for name in wanted) else None


def why_not_native(folder: ModelFolder, dtype: torch.dtype) -> str | None:
    """Why a model takes the torch path on this processor, by its config alone; None: it does not.

    A config that cannot be read has no native pass: loading says what is wrong with it.
    """
    try:
        shape_of(config_of(folder.path), dtype)
    except NotNativeError as reason:
        return str(reason)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return f"its config cannot be read: {error}"
    return None


def lower(module: Any, context_tokens: int) -> tuple[DecoderShape, DecoderWeights]:
    """Shape and weights (views, not copies) of a loaded model. Raises `NotNativeError`."""
    shape = shape_of(module.config, module.dtype)
    cos, sin = rotary_tables(module.config, shape, context_tokens)
    return shape, DecoderWeights(
        embedding=module.model.embed_tokens.weight,
        head=module.lm_head.weight,
        norm=module.model.norm.weight,
        cos=cos,
        sin=sin,
        layers=tuple(_layer(layer) for layer in module.model.layers),
    )


def rotary_tables(config: Any, shape: DecoderShape, context_tokens: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [positions, head_dim]."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rotary.tables(rope, shape.head_dim, config.max_position_embeddings, context_tokens)


def shape_of(config: Any, dtype: torch.dtype) -> DecoderShape:
    """The shape of a model with this config. Raises `NotNativeError`."""
    if config.model_type not in NATIVE_MODEL_TYPES:
        raise NotNativeError(f"architecture {config.model_type} has no native pass")
    if config.hidden_act != "silu" or getattr(config, "mlp_bias", False):
        raise NotNativeError("its feed-forward layers are not plain SwiGLU")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in rotary.ROPE_TYPES:
        raise NotNativeError(f"rope type {rope.get('rope_type')} depends on the length")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise NotNativeError("only a part of each head is rotated")
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    shape = DecoderShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        inter=config.intermediate_size,
        vocab=config.vocab_size,
        window=_window(config),
        eps=config.rms_norm_eps,
        scaling=head_dim**-0.5,
    )
    reason = cpu.why_not(shape, dtype)
    if reason is not None:
        raise NotNativeError(reason)
    return shape


def _layer(layer: Any) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    biases = [p.bias for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
    return LayerWeights(
        norm1=layer.input_layernorm.weight,
        norm2=layer.post_attention_layernorm.weight,
        q=attention.q_proj.weight,
        k=attention.k_proj.weight,
        v=attention.v_proj.weight,
        o=attention.o_proj.weight,
        gate=mlp.gate_proj.weight,
        up=mlp.up_proj.weight,
        down=mlp.down_proj.weight,
        qkv_bias=None if biases[0] is None else torch.cat(biases),
        o_bias=attention.o_proj.bias,
        q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
    )


def _window(config: Any) -> int:
    """The sliding window all layers share; 0 for none."""
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if window is None or kinds == {"full_attention"}:
        return 0
    if len(kinds) > 1:
        raise NotNativeError("its layers differ in their attention windows")
    return int(window)
