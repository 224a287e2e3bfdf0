"""Attention over paged KV blocks, one sequence at a time: the definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specbatch.kernels.paged_attention.contract import RaggedBatch, path_to


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

    Heads are grouped: query head h reads KV head h // (num_heads / num_kv_heads). In a tree every
    row is computed by itself over its path, so it has the bits of the same token fed alone.
    """
    out = torch.zeros_like(query)
    for i, context in enumerate(batch.context_lens):
        start, end = batch.query_starts[i], batch.query_starts[i + 1]
        blocks = torch.tensor(batch.block_tables[i], device=query.device)
        keys, values = (c[blocks].flatten(0, 1)[:context] for c in (key_cache, value_cache))
        if batch.parents is None:
            out[start:end] = _attend(query[start:end], keys, values, scaling, window, softcap)
            continue
        cached = context - (end - start)
        for row in range(end - start):
            path = [cached + r for r in path_to(row, batch.parents[i])]
            seen = torch.tensor([*range(cached), *path], device=query.device)
            alone = slice(start + row, start + row + 1)
            out[alone] = _attend(query[alone], keys[seen], values[seen], scaling, window, softcap)
    return out


def keep_path(
    cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], keys or values
    slots: Tensor,  # [n] int64, of one sequence's rows, as in the batch
    path: Sequence[int],  # the rows that are kept, from the first on
) -> None:
    """After a tree's pass: the KV of the kept rows goes to where a chain's would lie."""
    by_slot = cache.view(-1, *cache.shape[2:])
    by_slot[slots[: len(path)]] = by_slot[slots[torch.tensor(path)]]


def _attend(
    query: Tensor,  # [num_queries, num_heads, head_dim], of the newest tokens of the context
    keys: Tensor,  # [context, num_kv_heads, head_dim]
    values: Tensor,  # [context, num_kv_heads, head_dim]
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    group, context = query.shape[1] // keys.shape[1], keys.shape[0]
    keys, values = (kv.float().repeat_interleave(group, dim=1) for kv in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(context - query.shape[0], context, device=query.device)[:, None]
    key_at = torch.arange(context, device=query.device)[None, :]
    hidden = key_at > at
    if window is not None:
        hidden |= key_at <= at - window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
