"""Shapes and weights of a Llama-style decoder, whatever runs it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specbatch.kernels.paged_attention.contract import RaggedBatch

BLOCK_SIZE = 32  # tokens per KV block


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes; `window` is 0 for full attention."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int
    vocab: int
    window: int
    eps: float
    scaling: float


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer as the model stores them: [out, in]. Biases and norms may be absent."""

    norm1: Tensor  # [hidden]
    norm2: Tensor  # [hidden]
    q: Tensor  # [heads · head_dim, hidden]
    k: Tensor  # [kv_heads · head_dim, hidden]
    v: Tensor  # [kv_heads · head_dim, hidden]
    o: Tensor  # [hidden, heads · head_dim]
    gate: Tensor  # [inter, hidden]
    up: Tensor  # [inter, hidden]
    down: Tensor  # [hidden, inter]
    qkv_bias: Tensor | None = None  # [(heads + 2 · kv_heads) · head_dim]
    o_bias: Tensor | None = None  # [hidden]
    q_norm: Tensor | None = None  # [head_dim]
    k_norm: Tensor | None = None  # [head_dim]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights, in the model's dtype; the rotary tables in float32."""

    embedding: Tensor  # [vocab, hidden]
    head: Tensor  # [vocab, hidden]
    norm: Tensor  # [hidden]
    cos: Tensor  # [positions, head_dim]
    sin: Tensor  # [positions, head_dim]
    layers: tuple[LayerWeights, ...]


@dataclass(frozen=True, slots=True)
class DecoderBatch:
    """One ragged batch: the newest tokens of every sequence, concatenated."""

    ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    ragged: RaggedBatch  # slots are block · BLOCK_SIZE + offset
    logit_rows: Tensor  # [num_rows] int64 into the tokens
