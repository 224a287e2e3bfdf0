"""Which models run as one native decoder pass, and their weights in its terms."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig

from specbatch.kernels.decoder import cpu
from specbatch.kernels.decoder.contract import DecoderShape, DecoderWeights, LayerWeights
from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.engines.exact.model import rotary
from specbatch.pipeline.engines.models.model_folder import NATIVE_MODEL_TYPES


class NotNativeError(Exception):
    """The model takes the torch path; the message says why."""


def why_not_native(folder: ModelFolder, dtype: torch.dtype) -> str | None:
    """Why a model takes the torch path on this processor, by its config alone; None: it does not.

    A config that cannot be read has no native pass: loading says what is wrong with it.
    """
    try:
        config = AutoConfig.from_pretrained(str(folder.path), trust_remote_code=False)
        _shape(config, dtype)
    except NotNativeError as reason:
        return str(reason)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return f"its config cannot be read: {error}"
    return None


def lower(module: Any, context_tokens: int) -> tuple[DecoderShape, DecoderWeights]:
    """Shape and weights (views, not copies) of a loaded model. Raises `NotNativeError`."""
    config = module.config
    shape = _shape(config, module.dtype)
    rope = getattr(config, "rope_parameters", None) or {}
    cos, sin = rotary.tables(rope, shape.head_dim, config.max_position_embeddings, context_tokens)
    return shape, DecoderWeights(
        embedding=module.model.embed_tokens.weight,
        head=module.lm_head.weight,
        norm=module.model.norm.weight,
        cos=cos,
        sin=sin,
        layers=tuple(_layer(layer) for layer in module.model.layers),
    )


def _shape(config: Any, dtype: torch.dtype) -> DecoderShape:
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
