"""Reads a native model's weights straight from its safetensors files, without building its module.

Importing transformers' modules takes several seconds of processor time, more than most models take
to read. Weights that are not exactly as these families save them (a base model, another export, a
quantised one, something missing) are left to transformers, which knows other names or says what is
wrong.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from specbatch.kernels.decoder.contract import DecoderShape, DecoderWeights, LayerWeights
from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.engines.exact.model.native_model import (
    NotNativeError,
    config_of,
    rotary_tables,
    shape_of,
)
from specbatch.pipeline.engines.models.model_check import INDEX, SINGLE
from specbatch.pipeline.engines.models.model_folder import end_tokens

log = logging.getLogger(__name__)


class NotAsSavedError(Exception):
    """The weights have other names or shapes than the family's; the message says which."""


@dataclass(frozen=True, slots=True)
class NativeModel:
    """What the native pass needs of a model."""

    shape: DecoderShape
    weights: DecoderWeights
    eos_ids: frozenset[int]


def read_native(folder: ModelFolder, dtype: torch.dtype) -> NativeModel | None:
    """The model in memory of its own, in `dtype`; None: transformers must load it.

    Raises what reading a file raises.
    """
    config = config_of(folder.path)
    try:
        shape = shape_of(config, dtype)
        if getattr(config, "quantization_config", None) is not None:
            raise NotAsSavedError("its weights are quantised")
        with ExitStack() as stack:
            weights = _Weights(_opened(folder.path, stack), dtype).decoder(shape, config, folder)
    except NotNativeError:
        return None
    except NotAsSavedError as reason:
        log.info("transformers reads the weights of model %s: %s", folder.ref, reason)
        return None
    return NativeModel(shape, weights, end_tokens(folder.path, config.eos_token_id))


def _opened(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """The open file of each tensor. A single file goes before an index, as in transformers."""
    if (folder / SINGLE).exists():
        names = [SINGLE]
    else:
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    files = [stack.enter_context(safe_open(folder / name, framework="pt")) for name in names]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118 - no mapping


class _Weights:
    """Tensors by their names, copied out of the mapped files: a mapped file shows later writes, and
    reading beyond a later truncation kills the process."""

    def __init__(self, files: dict[str, Any], dtype: torch.dtype) -> None:
        self._files = files
        self._dtype = dtype

    def decoder(self, shape: DecoderShape, config: Any, folder: ModelFolder) -> DecoderWeights:
        embedding = self._tensor("model.embed_tokens.weight", shape.vocab, shape.hidden)
        tied = bool(config.tie_word_embeddings)
        if tied and "lm_head.weight" in self._files:
            raise NotAsSavedError(
                "its config ties the output head to the embedding, but the weights have a "
                "separate head"
            )
        head = embedding if tied else self._tensor("lm_head.weight", shape.vocab, shape.hidden)
        cos, sin = rotary_tables(config, shape, folder.context_tokens)
        return DecoderWeights(
            embedding=embedding,
            head=head,
            norm=self._tensor("model.norm.weight", shape.hidden),
            cos=cos,
            sin=sin,
            layers=tuple(self._layers(shape, config)),
        )

    def _layers(self, shape: DecoderShape, config: Any) -> Iterator[LayerWeights]:
        """With the biases and norms that the family has; others would be ignored."""
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        hidden, inter, family = shape.hidden, shape.inter, config.model_type
        biased = family != "mistral" and bool(getattr(config, "attention_bias", False))
        rows = {"q": queries, "k": keys, "v": keys}
        for number in range(shape.layers):
            of = f"model.layers.{number}."
            at, mlp = f"{of}self_attn.", f"{of}mlp."
            bias = [
                self._tensor(f"{at}{name}_proj.bias", rows[name])
                for name in (rows if biased or family == "qwen2" else ())
            ]
            normed = family == "qwen3"
            yield LayerWeights(
                norm1=self._tensor(f"{of}input_layernorm.weight", hidden),
                norm2=self._tensor(f"{of}post_attention_layernorm.weight", hidden),
                q=self._tensor(f"{at}q_proj.weight", queries, hidden),
                k=self._tensor(f"{at}k_proj.weight", keys, hidden),
                v=self._tensor(f"{at}v_proj.weight", keys, hidden),
                o=self._tensor(f"{at}o_proj.weight", hidden, queries),
                gate=self._tensor(f"{mlp}gate_proj.weight", inter, hidden),
                up=self._tensor(f"{mlp}up_proj.weight", inter, hidden),
                down=self._tensor(f"{mlp}down_proj.weight", hidden, inter),
                qkv_bias=torch.cat(bias) if bias else None,
                o_bias=self._tensor(f"{at}o_proj.bias", hidden)
                if biased and family != "qwen2"
                else None,
                q_norm=self._tensor(f"{at}q_norm.weight", shape.head_dim) if normed else None,
                k_norm=self._tensor(f"{at}k_norm.weight", shape.head_dim) if normed else None,
            )

    def _tensor(self, name: str, *shape: int) -> Tensor:
        if name not in self._files:
            raise NotAsSavedError(f"there is no tensor {name}")
        found: Tensor = self._files[name].get_tensor(name)
        if tuple(found.shape) != shape or not found.is_floating_point():
            raise NotAsSavedError(f"tensor {name} is {found.dtype} of shape {[*found.shape]}")
        return found.clone() if found.dtype == self._dtype else found.to(self._dtype)
