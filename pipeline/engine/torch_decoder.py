"""Runs a transformers module over ragged batches, for every architecture and device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specbatch.kernels.decoder.contract import BLOCK_SIZE, DecoderBatch
from specbatch.pipeline.engine.loader import LoadedModel


class TorchDecoder:
    """The module with a paged KV cache of `num_blocks` zeroed blocks, written by our attention."""

    def __init__(self, model: LoadedModel, num_blocks: int) -> None:
        self._module: Any = model.module
        shape = (num_blocks, BLOCK_SIZE, model.num_kv_heads, model.head_dim)

        # Zeroed memory is not touched before it is used: an ample cache costs nothing at first.
        def cache() -> Tensor:
            return torch.zeros(shape, dtype=model.dtype, device=model.device)

        self._caches = [(cache(), cache()) for _ in range(model.num_layers)]

    def forward(self, batch: DecoderBatch) -> Tensor:
        """Feed the batch; float32 logits [num_rows, vocab] of the wanted rows."""
        out = self._module(
            input_ids=batch.ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            paged=(batch.ragged, self._caches),
        )
        logits: Tensor = out.logits[0].float()
        return logits
