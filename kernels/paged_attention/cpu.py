"""Attention over paged KV blocks for processors: a few matrix products of constant shape.

    NT  query tiles: 8 consecutive tokens of one sequence       G  query heads per KV head
    C   keys in a chunk (128)                                   D  head dimension

Every product is [8·G, D]·[D, C] or [8·G, C]·[C, D]; only how many of them run at once varies with
the batch. Chunks are added up in order. So a token's bits depend neither on its neighbours nor on
how many tokens of its sequence share the pass, provided the library computes the members of a
batched product alike, which the tests see to.

A batch that need not be `batch_invariant` has tiles no longer than its longest run of queries: in a
decoding step seven eighths of a tile would be padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from specbatch.kernels.paged_attention.contract import NO_TREES, RaggedBatch

TILE_TOKENS = 8
CHUNK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The tiles that reach the c-th chunk of their context: the first `tiles` of all."""

    tiles: int
    blocks: Tensor  # [tiles * CHUNK_TOKENS / block_size] int64
    hidden: Tensor  # [tiles, 1, 1, tile, CHUNK_TOKENS] bool, True where a key is unseen
    unused: Tensor  # [n] int64 into [tiles * CHUNK_TOKENS], the keys that no query of a tile sees


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Index work done once per pass and shared by all layers (with the same window)."""

    tokens: int  # in a tile
    rows: Tensor  # [NT * tokens] int64 into the tokens plus one row of zeros
    scatter: Tensor  # [num_tokens] int64 into [NT * tokens] plus one row of zeros
    chunks: tuple[_Chunk, ...]


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    batch: RaggedBatch,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As `reference.paged_attention`; `block_size` must divide 128."""
    num_heads, head_dim = query.shape[1:]
    block_size, kv_heads = key_cache.shape[1:3]
    group = num_heads // kv_heads
    key = ("cpu", block_size, window)
    if key not in batch.prepared:
        batch.prepared[key] = _prepare(batch, query.shape[0], block_size, window)
    tiles = cast(_Tiles, batch.prepared[key])
    padded = torch.cat((query, query.new_zeros(1, num_heads, head_dim)))
    q = padded[tiles.rows].float().mul_(scaling)
    q = q.view(-1, tiles.tokens, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4).contiguous()
    q = q.view(-1, kv_heads, group * tiles.tokens, head_dim)

    # 1) Scores, chunk by chunk, and their maximum.
    scores = [_scores(q, key_cache, chunk, group, softcap) for chunk in tiles.chunks]
    peak = scores[0].amax(dim=-1, keepdim=True)
    for chunk, s in zip(tiles.chunks[1:], scores[1:], strict=True):
        torch.maximum(peak[: chunk.tiles], s.amax(-1, keepdim=True), out=peak[: chunk.tiles])
    peak.clamp_min_(torch.finfo(torch.float32).min)  # a padded query sees nothing

    # 2) Weights times values and the weights' sum, added in the order of the chunks.
    out = torch.zeros_like(q)
    total = torch.zeros_like(peak)
    for chunk, s in zip(tiles.chunks, scores, strict=True):
        weights = s.sub_(peak[: chunk.tiles]).exp_()
        total[: chunk.tiles] += weights.sum(dim=-1, keepdim=True)
        out[: chunk.tiles] += weights @ _values(value_cache, chunk)
    out /= total.clamp_min_(torch.finfo(torch.float32).tiny)

    # 3) Back to one row of tokens.
    out = out.view(-1, kv_heads, group, tiles.tokens, head_dim).permute(0, 3, 1, 2, 4)
    flat = out.reshape(-1, num_heads, head_dim)
    flat = torch.cat((flat, flat.new_zeros(1, num_heads, head_dim)))
    return flat[tiles.scatter].to(query.dtype)


def _scores(
    q: Tensor, key_cache: Tensor, chunk: _Chunk, group: int, softcap: float | None
) -> Tensor:
    """[tiles, kv_heads, group * tile, CHUNK_TOKENS] float32, -inf where unseen."""
    s = q[: chunk.tiles] @ _by_head(key_cache[chunk.blocks], chunk).transpose(-1, -2)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    by_head = s.view(chunk.tiles, -1, group, chunk.hidden.shape[3], CHUNK_TOKENS)
    by_head.masked_fill_(chunk.hidden, float("-inf"))
    return s


def _values(value_cache: Tensor, chunk: _Chunk) -> Tensor:
    """Zero where unused: a weight of 0 does not silence the NaN another sequence left behind."""
    values = value_cache[chunk.blocks]
    values.flatten(0, 1).index_fill_(0, chunk.unused, 0.0)
    return _by_head(values, chunk)


def _by_head(blocks: Tensor, chunk: _Chunk) -> Tensor:
    """[tiles, kv_heads, CHUNK_TOKENS, head_dim] float32."""
    kv_heads, head_dim = blocks.shape[2:]
    return blocks.float().view(chunk.tiles, CHUNK_TOKENS, kv_heads, head_dim).transpose(1, 2)


def _prepare(batch: RaggedBatch, num_tokens: int, block_size: int, window: int | None) -> _Tiles:
    assert batch.parents is None, NO_TREES
    starts = np.asarray(batch.query_starts, dtype=np.int64)
    contexts = np.asarray(batch.context_lens, dtype=np.int64)
    # 1) Cut every sequence's tokens into tiles, the longest contexts first.
    lengths = np.diff(starts)
    tile = TILE_TOKENS if batch.batch_invariant else min(TILE_TOKENS, max(1, int(lengths.max())))
    per_seq = -(-lengths // tile)
    owner = np.repeat(np.arange(len(lengths)), per_seq)
    ordinal = np.arange(len(owner)) - np.repeat(np.cumsum(per_seq) - per_seq, per_seq)
    reach = np.minimum(contexts[owner] - lengths[owner] + (ordinal + 1) * tile, contexts[owner])
    order = np.argsort(-reach, kind="stable")
    owner, ordinal, reach = owner[order], ordinal[order], reach[order]

    # 2) Which token each tile row holds, and where it sits in its sequence.
    in_seq = ordinal[:, None] * tile + np.arange(tile)
    real = in_seq < lengths[owner][:, None]
    rows = np.where(real, starts[owner][:, None] + in_seq, num_tokens)
    position = (contexts - lengths)[owner][:, None] + in_seq
    scatter = np.full(num_tokens, rows.size, dtype=np.int64)
    scatter[rows[real]] = np.flatnonzero(real)

    # 3) Blocks and visibility per chunk.
    width = CHUNK_TOKENS // block_size
    tables = np.zeros((len(lengths), -(-int(contexts.max()) // CHUNK_TOKENS) * width), np.int64)
    for i, table in enumerate(batch.block_tables):
        used = min(len(table), tables.shape[1])
        tables[i, :used] = table[:used]
    chunks = []
    for c in range(-(-int(reach.max()) // CHUNK_TOKENS)):
        tiles = int(np.count_nonzero(reach > c * CHUNK_TOKENS))
        key_at = c * CHUNK_TOKENS + np.arange(CHUNK_TOKENS)
        hidden = key_at > position[:tiles, :, None]
        if window is not None:
            hidden |= key_at <= position[:tiles, :, None] - window
        hidden |= ~real[:tiles, :, None]
        blocks = tables[owner[:tiles], c * width : (c + 1) * width].reshape(-1)
        unused = np.flatnonzero(hidden.all(axis=1))
        chunks.append(
            _Chunk(
                tiles,
                torch.from_numpy(blocks),
                torch.from_numpy(hidden)[:, None, None],
                torch.from_numpy(unused),
            )
        )
    indices = (torch.from_numpy(rows.reshape(-1)), torch.from_numpy(scatter))
    return _Tiles(tile, *indices, tuple(chunks))
