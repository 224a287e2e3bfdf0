"""Runs a transformers module over ragged batches, for every architecture and device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specbatch.kernels.decoder.contract import BLOCK_SIZE, DecoderBatch
from specbatch.kernels.paged_attention.contract import zeroed_cache
from specbatch.pipeline.engines.exact.model.loaded_model import LoadedModel, attention_of


class TorchDecoder:
    """The module with a paged KV cache of `num_blocks` zeroed blocks, written by our attention."""

    def __init__(self, model: LoadedModel, num_blocks: int) -> None:
        self._module: Any = model.module
        self._batch_invariant = model.exactness == "bitwise"
        self._attend = attention_of(model.kernels, model.device)
        shape = (num_blocks, BLOCK_SIZE, model.num_kv_heads, model.head_dim)
        self._caches = [
            (
                zeroed_cache(shape, model.dtype, model.device),
                zeroed_cache(shape, model.dtype, model.device),
            )
            for _ in range(model.num_layers)
        ]

    @property
    def vocab_size(self) -> int:
        """Columns of its logits."""
        return int(self._module.config.get_text_config().vocab_size)

    def memory(self, tokens: int, rows: int, context: int) -> tuple[int, int, int]:
        """Bytes of the weights, of keys and values when every block is in use, and about what a
        pass of `tokens` tokens and `rows` rows of logits takes besides: torch decides.

        Logits in the model's dtype and in float32; of a layer at most its widest few activations;
        one sequence's keys and values, gathered for attention.
        """
        tensors = (*self._module.parameters(), *self._module.buffers())
        plain = [part for tensor in tensors for part in _plain(tensor)]
        weights = sum({part.data_ptr(): part.nbytes for part in plain}.values())
        cache_bytes = sum(cache.nbytes for pair in self._caches for cache in pair)
        config = self._module.config.get_text_config()
        item, keys = self._caches[0][0].element_size(), self._caches[0][0]
        inter = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        widest = 4 * config.hidden_size + 3 * inter
        gathered = 2 * context * keys.shape[2] * keys.shape[3] * item
        work = int(rows * self.vocab_size * (item + 4) + tokens * widest * item + gathered)
        return weights, cache_bytes, work

    def forward(self, batch: DecoderBatch) -> Tensor:
        """Feed the batch; float32 logits [num_rows, vocab] of the wanted rows."""
        batch.ragged.batch_invariant = self._batch_invariant
        out = self._module(
            input_ids=batch.ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            paged=(batch.ragged, self._caches, self._attend),
        )
        logits: Tensor = out.logits[0].float()
        return logits


def _plain(tensor: Tensor) -> list[Tensor]:
    """What holds its data: a quantised or shared tensor wraps others and has no memory itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    names, _ = flatten()
    parts = [getattr(tensor, name) for name in names]  # a shared one names its ranks, too
    return [plain for part in parts if isinstance(part, Tensor) for plain in _plain(part)]
