"""Attention over paged KV blocks, one sequence at a time: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from specbatch.kernels.paged_attention.contract import RaggedBatch


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    batch: RaggedBatch,
    scaling: float,
    window: int | None = None,  # tokens a query sees, itself included
    softcap: float | None = None,
) -> Tensor:
    """Softmax attention in float32; output [num_tokens, num_heads, head_dim] in the query's dtype.

    Heads are grouped: query head h reads KV head h // (num_heads / num_kv_heads).
    """
    out = torch.zeros_like(query)
    group = query.shape[1] // key_cache.shape[2]
    for i, context in enumerate(batch.context_lens):
        start, end = batch.query_starts[i], batch.query_starts[i + 1]
        blocks = torch.tensor(batch.block_tables[i], device=query.device)
        keys = key_cache[blocks].flatten(0, 1)[:context].float().repeat_interleave(group, dim=1)
        values = value_cache[blocks].flatten(0, 1)[:context].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[start:end].float(), keys) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(context - (end - start), context, device=query.device)[:, None]
        key_at = torch.arange(context, device=query.device)[None, :]
        hidden = key_at > at
        if window is not None:
            hidden |= key_at <= at - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return out
