"""Attention over paged KV blocks in Triton: one program per tile of queries and KV head.

    T  query tiles: 8 consecutive tokens of one sequence       G  query heads per KV head
    C  keys in a chunk (64)                                    D  head dimension

A program walks its context chunk by chunk, from the first chunk that any of its queries sees.
Chunks begin at multiples of C and a chunk unseen by a query adds exactly nothing to it; there is
no split over keys. So a token's bits depend neither on the batch nor on how many tokens share it.

Products are of float32. Caches of 16 bits are multiplied in TF32, which holds their values exactly
and has tensor cores; only the weights are rounded, to TF32's 11 bits. Float32 caches take no such
short cut. Triton's interpreter computes both in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from specbatch.kernels.paged_attention.contract import NO_TREES, RaggedBatch, to_device

TILE_TOKENS = 8
CHUNK_TOKENS = 64
_LEAST = 16  # of any side of a product

_MINUS_INF = tl.constexpr(float("-inf"))


PREPARED = "triton"  # the key of `Tiles` in `RaggedBatch.prepared`


@dataclass(frozen=True, slots=True)
class Tiles:
    """Index work done once per pass and shared by all layers; it stays on the device.

    A tile without tokens does nothing, so that a pass can be padded to a constant number of tiles.
    """

    tiles: Tensor  # [T, 4] int32: first token, tokens, position of the first, its table's start
    tables: Tensor  # [blocks of all sequences] int32, their block tables one behind the other


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    batch: RaggedBatch,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As `reference.paged_attention`."""
    num_heads, head_dim = query.shape[1:]
    block_size, kv_heads = key_cache.shape[1:3]
    group = num_heads // kv_heads
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    if PREPARED not in batch.prepared:
        batch.prepared[PREPARED] = prepare(batch, query.device)
    prepared = cast(Tiles, batch.prepared[PREPARED])
    if not len(prepared.tiles):
        return out
    _attend[(len(prepared.tiles), kv_heads)](
        query.contiguous(),
        key_cache.contiguous(),
        value_cache.contiguous(),
        out,
        prepared.tiles,
        prepared.tables,
        scaling,
        window or 0,
        softcap or 1.0,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        has_window=window is not None,
        has_softcap=softcap is not None,
        precision="ieee" if key_cache.dtype == torch.float32 else "tf32",
        rows=max(_LEAST, triton.next_power_of_2(TILE_TOKENS * group)),
        columns=max(_LEAST, triton.next_power_of_2(head_dim)),
        chunk=CHUNK_TOKENS,
        enable_fp_fusion=True,
    )
    return out


def prepare(batch: RaggedBatch, device: torch.device, least_tiles: int = 0) -> Tiles:
    """Cut every sequence's tokens into tiles, on the host; two copies that do not wait.

    Tiles without tokens are added until there are `least_tiles`.
    """
    assert batch.parents is None, NO_TREES
    starts = np.asarray(batch.query_starts, dtype=np.int64)
    contexts = np.asarray(batch.context_lens, dtype=np.int64)
    lengths = np.diff(starts)
    per_seq = -(-lengths // TILE_TOKENS)
    owner = np.repeat(np.arange(len(lengths)), per_seq)
    first = (np.arange(len(owner)) - np.repeat(np.cumsum(per_seq) - per_seq, per_seq)) * TILE_TOKENS
    sizes = np.array([len(table) for table in batch.block_tables], dtype=np.int64)
    tiles = np.zeros((max(len(owner), least_tiles), 4), dtype=np.int32)
    tiles[: len(owner), 0] = starts[owner] + first
    tiles[: len(owner), 1] = np.minimum(lengths[owner] - first, TILE_TOKENS)
    tiles[: len(owner), 2] = (contexts - lengths)[owner] + first
    tiles[: len(owner), 3] = (np.cumsum(sizes) - sizes)[owner]
    tables = np.zeros(max(int(sizes.sum()), 1), dtype=np.int32)
    tables[: int(sizes.sum())] = [block for table in batch.block_tables for block in table]
    return Tiles(*(to_device(array, device) for array in (tiles, tables)))


@triton.jit
def _attend(
    query,  # [num_tokens, kv_heads * group, head_dim]
    key_cache,  # [num_blocks, block_size, kv_heads, head_dim]
    value_cache,  # as key_cache
    out,  # as query
    tiles,  # [T, 4] int32
    tables,  # [blocks of all sequences] int32
    scaling,
    window,
    softcap,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    has_window: tl.constexpr,
    has_softcap: tl.constexpr,
    precision: tl.constexpr,
    rows: tl.constexpr,  # at least 8 * group: row r is token r // group, head r % group
    columns: tl.constexpr,  # at least head_dim
    chunk: tl.constexpr,
):
    tile, kv_head = tiles + 4 * tl.program_id(0), tl.program_id(1)
    first_token, count = tl.load(tile).to(tl.int64), tl.load(tile + 1)
    first_at, table = tl.load(tile + 2), tables + tl.load(tile + 3)

    # 1) The tile's queries, one row per token and head.
    row, d = tl.arange(0, rows), tl.arange(0, columns)
    real = (row // group) < count
    at = first_at + row // group
    heads = (first_token + row // group) * (kv_heads * group) + kv_head * group + row % group
    position = heads[:, None] * head_dim + d[None, :]
    held = real[:, None] & (d < head_dim)[None, :]
    q = tl.load(query + position, mask=held, other=0.0).to(tl.float32)

    # 2) Every chunk that one of them sees, in order.
    lowest, reach = 0, first_at + count
    if has_window:
        lowest = tl.maximum(first_at - window + 1, 0)
    peak = tl.full([rows], _MINUS_INF, tl.float32)
    total = tl.zeros([rows], tl.float32)
    mixed = tl.zeros([rows, columns], tl.float32)
    for begin in range(lowest // chunk * chunk, reach, chunk):
        key_at = begin + tl.arange(0, chunk)
        used = (key_at >= lowest) & (key_at < reach)
        block = tl.load(table + key_at // block_size, mask=used, other=0).to(tl.int64)
        slot = (block * block_size + key_at % block_size) * kv_heads + kv_head
        # What no query sees is never read: a weight of 0 does not silence a stranger's NaN.
        stored = slot[:, None] * head_dim + d[None, :]
        present = used[:, None] & (d < head_dim)[None, :]
        keys = tl.load(key_cache + stored, mask=present, other=0.0).to(tl.float32)
        values = tl.load(value_cache + stored, mask=present, other=0.0).to(tl.float32)
        scores = tl.dot(q, tl.trans(keys), input_precision=precision) * scaling
        if has_softcap:
            scores = softcap * _tanh(scores / softcap)
        seen = real[:, None] & (key_at[None, :] <= at[:, None])
        if has_window:
            seen = seen & (key_at[None, :] > at[:, None] - window)
        scores = tl.where(seen, scores, _MINUS_INF)
        ordered = tl.where(scores == scores, scores, _MINUS_INF)  # NaN passes to the weights
        higher = tl.maximum(peak, tl.max(ordered, axis=1))
        finite = tl.where(higher == _MINUS_INF, 0.0, higher)
        weights = tl.exp(scores - finite[:, None])
        shrink = tl.exp(peak - finite)
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weights, values, input_precision=precision)
        peak = higher

    # 3) Back to the row of tokens.
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + position, mixed.to(out.dtype.element_ty), mask=held)


@triton.jit
def _tanh(x):
    """tanh without overflow: the exponential of a negative number only."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)
