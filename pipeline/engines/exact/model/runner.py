"""Runs a model over ragged batches with a paged KV cache: the verifier or a draft model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from specbatch.kernels.decoder import cpu
from specbatch.kernels.decoder.contract import BLOCK_SIZE, DecoderBatch
from specbatch.kernels.drafting import cpu as drafting
from specbatch.kernels.verify.contract import SamplingRows
from specbatch.pipeline.engines.exact.model.batch import Chunk, build_batch
from specbatch.pipeline.engines.exact.model.invariance import check_rows
from specbatch.pipeline.engines.exact.model.loaded_model import LoadedModel
from specbatch.pipeline.engines.exact.model.memory import ModelMemory
from specbatch.pipeline.engines.exact.model.torch_decoder import TorchDecoder
from specbatch.pipeline.engines.exact.state.kv_blocks import TRASH_BLOCK, BlockManager, KvState

if TYPE_CHECKING:  # it needs Triton, which only a GPU does
    from specbatch.pipeline.engines.exact.model.graphs import Capture

log = logging.getLogger(__name__)

SMALL_CACHE = "set SPECBATCH_KV_CACHE_MIB higher"
SHORT_OF_MEMORY = "no more memory was available for it"


class Decoder(Protocol):
    """Weights and KV cache of one model."""

    @property
    def weight_bytes(self) -> int: ...

    @property
    def cache_bytes(self) -> int: ...

    def workspace_bytes(self, tokens: int, rows: int, context: int) -> int: ...

    def forward(self, batch: DecoderBatch) -> Tensor: ...


def _unpadded(count: int) -> int:
    return count


class ModelRunner:
    """One model, its KV cache and the blocks of it.

    `consume` lets it empty the model's own tensors, so that they are not held beside its form of
    them; the model cannot be used for anything else then.
    """

    def __init__(
        self,
        model: LoadedModel,
        kv_cache_bytes: int,
        share_prefixes: bool = True,
        consume: bool = False,
        capture: Capture | None = None,
        spread: Callable[[TorchDecoder, int], Decoder] | None = None,
        is_capped: bool = False,
    ) -> None:
        """`capture` records passes of the torch path, where it is given.

        `spread` makes of its decoder, of so many blocks, one that other ranks share. `is_capped`:
        more bytes were wanted for the cache than there are.

        Raises `ModelError` if a bitwise model does not keep its bits on this device.
        """
        token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim
        token_bytes *= model.dtype.itemsize
        num_blocks = max(2, kv_cache_bytes // (token_bytes * BLOCK_SIZE))
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE, share_prefixes)
        self.device = model.device
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.kernels = model.kernels
        self.eos_ids = model.eos_ids
        # Whether a token's bits are the same in every batch; else `exactness: fast` was asked for.
        self.batch_invariant = model.native is not None or model.exactness == "bitwise"
        self.vocab_size = model.folder.vocab_size
        self._context_tokens = min(model.folder.context_tokens, self.blocks.capacity_tokens)
        # Why the cache has no room for the model's whole context; None: it has.
        self.shortage: str | None = None
        if self._context_tokens < model.folder.context_tokens:
            self.shortage = SHORT_OF_MEMORY if is_capped else SMALL_CACHE
        self._padded: Callable[[int], int] = _unpadded
        self._padded_rows: Callable[[int], int] = _unpadded
        self._decoder: Decoder
        if model.native is not None:
            self._decoder = cpu.Decoder(*model.native, num_blocks, consume)
        else:
            self._decoder = self._on_torch(model, num_blocks, capture)
            if spread is not None and isinstance(self._decoder, TorchDecoder):
                self._decoder = spread(self._decoder, num_blocks)

    def _on_torch(self, model: LoadedModel, num_blocks: int, capture: Capture | None) -> Decoder:
        decoder = TorchDecoder(model, num_blocks)
        if model.tiles is not None:
            self._padded = self._padded_rows = model.tiles.padded
        if model.kernels == "triton" and model.exactness == "bitwise":
            check_rows(decoder, model, num_blocks)
        if capture is None:
            return decoder
        from specbatch.pipeline.engines.exact.model.graphs import GraphedDecoder

        self._padded = GraphedDecoder.padded_tokens
        self._padded_rows = GraphedDecoder.padded_rows
        table_blocks = -(-self._context_tokens // BLOCK_SIZE) + 1
        return GraphedDecoder(decoder, capture, model.device, table_blocks)

    def padded(self, tokens: int) -> int:
        """Rows of a pass of so many tokens, those that fill it up included."""
        return self._padded(tokens)

    @property
    def context_tokens(self) -> int:
        """The longest sequence, prompt and output together, that can run."""
        return self._context_tokens

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Feed every chunk; returns float32 logits [num_rows, vocab_size] of the wanted rows.

        Rows follow the order of the chunks. Each chunk's `kv.length` grows by its tokens; if the
        pass raises, no length has changed, and what it wrote lies beyond them.
        """
        batch = build_batch(chunks, BLOCK_SIZE, self._padded, self.device, self._padded_rows)
        logits = self._decoder.forward(batch)
        rows = 0
        for kv, tokens, logit_rows in chunks:
            kv.length += len(tokens)
            rows += logit_rows
        return logits[:rows] if rows < logits.shape[0] else logits

    @property
    def drafts_natively(self) -> bool:
        return isinstance(self._decoder, cpu.Decoder)

    @torch.inference_mode()
    def draft(
        self, chunks: Sequence[Chunk], depths: list[int], counters: Tensor, sampling: SamplingRows
    ) -> Tensor:
        """Feed every chunk, then draft: int64 [deepest, num_chunks], -1 behind a chunk's depth.

        `depths` do not rise; each chunk wants one row of logits, and its blocks have room for
        what is drafted. `kv.length` grows by the chunk; behind it lies the KV of the drafted tokens
        but the last.
        """
        assert isinstance(self._decoder, cpu.Decoder), "ask `drafts_natively` first"
        batch = build_batch(chunks, BLOCK_SIZE, self._padded, self.device)
        drafts = drafting.draft(self._decoder, batch, depths, counters, sampling)
        for chunk in chunks:
            chunk.kv.length += len(chunk.token_ids)
        return drafts

    def memory(self, pass_tokens: int, pass_rows: int) -> ModelMemory:
        """What it holds when its cache is full, with passes no larger than this."""
        decoder = self._decoder
        workspace = decoder.workspace_bytes(pass_tokens, pass_rows, self._context_tokens)
        return ModelMemory(
            decoder.weight_bytes, decoder.cache_bytes, workspace, self.blocks.capacity_tokens
        )

    def is_sound(self) -> bool:
        """Whether a pass of one token, whose KV nobody reads, still goes through."""
        try:
            self.forward([Chunk(KvState([TRASH_BLOCK]), [0], 1)])
        except Exception:
            log.exception("not even a pass of one token goes through")
            return False
        return True

    def free_unused(self) -> None:
        """Give memory that torch keeps for later back to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
