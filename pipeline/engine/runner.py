"""Runs a model over ragged batches with a paged KV cache: the verifier or a draft model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specbatch.pipeline.engine.batch import Chunk, build_batch
from specbatch.pipeline.engine.blocks import BlockManager
from specbatch.pipeline.engine.loader import LoadedModel

BLOCK_SIZE = 32  # tokens per KV block; divides the attention's chunk


class ModelRunner:
    """One model, its KV cache and the blocks of it."""

    def __init__(self, model: LoadedModel, kv_cache_bytes: int) -> None:
        self.model = model
        token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim
        token_bytes *= model.dtype.itemsize
        num_blocks = max(2, kv_cache_bytes // (token_bytes * BLOCK_SIZE))
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE)
        shape = (num_blocks, BLOCK_SIZE, model.num_kv_heads, model.head_dim)
        # Zeroed memory is not touched before it is used, so an ample cache costs nothing at first.
        self._caches = [(self._zeros(shape), self._zeros(shape)) for _ in range(model.num_layers)]
        self._context_tokens = min(model.folder.context_tokens, self.blocks.capacity_tokens)

    @property
    def context_tokens(self) -> int:
        """The longest sequence, prompt and output together, that can run."""
        return self._context_tokens

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Feed every chunk; returns float32 logits [num_rows, vocab_size] of the wanted rows.

        Rows follow the order of the chunks. Each chunk's `kv.length` grows by its tokens.
        """
        tiles = self.model.tiles
        batch = build_batch(
            chunks,
            BLOCK_SIZE,
            padded=tiles.padded if tiles else lambda rows: rows,
            device=self.model.device,
        )
        out = self.model.module(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.logit_index,
            paged=(batch.ragged, self._caches),
        )
        for chunk in chunks:
            chunk.kv.length += len(chunk.token_ids)
        logits: Tensor = out.logits[0, : batch.num_rows].float()
        return logits

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=self.model.dtype, device=self.model.device)
