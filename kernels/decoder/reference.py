"""The decoder pass in plain torch: the definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.kernels.decoder.contract import (
    BLOCK_SIZE,
    DecoderBatch,
    DecoderShape,
    DecoderWeights,
    LayerWeights,
)
from specbatch.kernels.paged_attention.reference import paged_attention


class Decoder:
    """Weights with a paged KV cache of `num_blocks` blocks, zeroed."""

    def __init__(self, shape: DecoderShape, weights: DecoderWeights, num_blocks: int) -> None:
        self._shape, self._weights = shape, weights
        size = (num_blocks, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
        dtype = weights.embedding.dtype
        self.caches = [  # of every layer: keys, values
            (torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)) for _ in weights.layers
        ]

    def forward(self, batch: DecoderBatch) -> Tensor:
        """Feed the batch; float32 logits [num_rows, vocab] of the wanted rows.

        The residual stream is float32; what enters a matrix product, and the KV, is rounded to
        the model's dtype.
        """
        x = self._weights.embedding[batch.ids].float()
        for layer, caches in zip(self._weights.layers, self.caches, strict=True):
            x = x + self._attention(layer, caches, x, batch)
            normed = self._norm(x, layer.norm2)
            gated = F.silu(_linear(normed, layer.gate)) * _linear(normed, layer.up)
            x = x + _linear(self._rounded(gated), layer.down)
        return _linear(self._norm(x[batch.logit_rows], self._weights.norm), self._weights.head)

    def _attention(
        self, layer: LayerWeights, caches: tuple[Tensor, Tensor], x: Tensor, batch: DecoderBatch
    ) -> Tensor:
        s = self._shape
        qkv = _linear(self._norm(x, layer.norm1), torch.cat((layer.q, layer.k, layer.v)))
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias.float()
        q, k, v = (
            part.unflatten(1, (-1, s.head_dim))
            for part in qkv.split([n * s.head_dim for n in (s.heads, s.kv_heads, s.kv_heads)], 1)
        )
        q = self._rotate(q, layer.q_norm, batch.positions)
        k = self._rotate(k, layer.k_norm, batch.positions)
        for cache, new in zip(caches, (k, v), strict=True):
            cache.view(-1, s.kv_heads, s.head_dim)[batch.ragged.slots] = new.to(cache.dtype)
        out = paged_attention(q, *caches, batch.ragged, s.scaling, s.window or None)
        out = _linear(self._rounded(out.flatten(1)), layer.o)
        return out if layer.o_bias is None else out + layer.o_bias.float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self._shape.eps).rsqrt()
        return self._rounded(x * scale * weight.float())

    def _rotate(self, x: Tensor, norm: Tensor | None, positions: Tensor) -> Tensor:
        """Rotary embedding: the two halves of a head rotated against each other."""
        if norm is not None:
            scale = (x.square().mean(-1, keepdim=True) + self._shape.eps).rsqrt()
            x = x * scale * norm.float()
        half = torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)
        cos, sin = (t[positions][:, None] for t in (self._weights.cos, self._weights.sin))
        return x * cos + half * sin

    def _rounded(self, x: Tensor) -> Tensor:
        return x.to(self._weights.embedding.dtype)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.float(), weight.float())
