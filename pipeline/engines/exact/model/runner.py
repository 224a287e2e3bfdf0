"""Runs a model over ragged batches with a paged KV cache: the verifier or a draft model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from specbatch.kernels.decoder import cpu
from specbatch.kernels.decoder.contract import BLOCK_SIZE, DecoderBatch
from specbatch.kernels.multi_step import cpu as multi_step
from specbatch.kernels.multi_step.contract import Generated, Stops
from specbatch.kernels.verify.contract import SamplingRows
from specbatch.pipeline.engines.exact.model.batch import Chunk, build_batch
from specbatch.pipeline.engines.exact.model.loaded_model import LoadedModel
from specbatch.pipeline.engines.exact.model.memory import MemoryBudget
from specbatch.pipeline.engines.exact.model.torch_decoder import TorchDecoder
from specbatch.pipeline.engines.state.kv_blocks import TRASH_BLOCK, BlockManager, KvState
from specbatch.schemas.errors import ModelError

if TYPE_CHECKING:  # it needs Triton, which only a GPU does
    from specbatch.pipeline.engines.exact.model.graphs import Capture

log = logging.getLogger(__name__)

SMALL_CACHE = "set SPECBATCH_KV_CACHE_MIB higher"
SHORT_OF_MEMORY = "no more memory was available for it"
PIECES = (1, 2, 4, 5)  # tokens of each pass
COMPANIONS = {"cuda": 300, "cpu": 20}  # sequences of one token; an interpreter is slow


class Decoder(Protocol):
    """Weights and KV cache of one model."""

    def memory(self, tokens: int, rows: int, context: int) -> tuple[int, int, int]: ...

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
        num_blocks = max(2, kv_cache_bytes // (model.token_bytes * BLOCK_SIZE))
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE, share_prefixes)
        self.device = model.device
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.kernels = model.kernels
        self.eos_ids = model.eos_ids
        # Whether a token's bits are the same in every batch; else `exactness: fast` was asked for.
        self.batch_invariant = model.native is not None or model.exactness == "bitwise"
        self.vocab_size = model.folder.vocab_size
        # The longest sequence, prompt and output together, that can run.
        self.context_tokens = min(model.folder.context_tokens, self.blocks.capacity_tokens)
        # Why the cache has no room for the model's whole context; None: it has.
        self.shortage: str | None = None
        if self.context_tokens < model.folder.context_tokens:
            self.shortage = SHORT_OF_MEMORY if is_capped else SMALL_CACHE
        # Rows of a pass of so many tokens, those that fill it up included.
        self.padded: Callable[[int], int] = _unpadded
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
            self.padded = self._padded_rows = model.tiles.padded
        if model.kernels == "triton" and model.exactness == "bitwise":
            check_rows(decoder, model, num_blocks)
        if capture is None:
            return decoder
        from specbatch.pipeline.engines.exact.model import graphs

        self.padded = partial(graphs.bucket, graphs.TOKEN_BUCKETS)
        self._padded_rows = partial(graphs.bucket, graphs.ROW_BUCKETS)
        table_blocks = -(-self.context_tokens // BLOCK_SIZE) + 1
        return graphs.GraphedDecoder(decoder, capture, model.device, table_blocks)

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Feed every chunk; returns float32 logits [num_rows, vocab_size] of the wanted rows.

        Rows follow the order of the chunks. Each chunk's `kv.length` grows by its tokens; if the
        pass raises, no length has changed, and what it wrote lies beyond them.
        """
        batch = build_batch(chunks, BLOCK_SIZE, self.padded, self.device, self._padded_rows)
        logits = self._decoder.forward(batch)
        rows = 0
        for kv, tokens, logit_rows in chunks:
            kv.length += len(tokens)
            rows += logit_rows
        return logits[:rows] if rows < logits.shape[0] else logits

    @property
    def runs_several(self) -> bool:
        """Whether `draft` and `generate` are there: several passes in one call."""
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
        assert isinstance(self._decoder, cpu.Decoder), "ask `runs_several` first"
        batch = build_batch(chunks, BLOCK_SIZE, self.padded, self.device)
        drafts = multi_step.draft(self._decoder, batch, depths, counters, sampling)
        for chunk in chunks:
            chunk.kv.length += len(chunk.token_ids)
        return drafts

    @torch.inference_mode()
    def generate(
        self,
        chunks: Sequence[Chunk],
        limits: list[int],
        stops: Stops,
        counters: Tensor,
        sampling: SamplingRows,
    ) -> Generated:
        """Feed every chunk of one token, then decide up to `limits[i]` tokens of each sequence.

        Its blocks have room for them. `kv.length` grows by what was fed: all but the last token.
        If it raises, no length has changed.
        """
        assert isinstance(self._decoder, cpu.Decoder), "ask `runs_several` first"
        batch = build_batch(chunks, BLOCK_SIZE, self.padded, self.device)
        generated = multi_step.generate(self._decoder, batch, limits, stops, counters, sampling)
        for chunk, made in zip(chunks, generated.made, strict=True):
            chunk.kv.length += made
        return generated

    @property
    def recordings(self) -> int:
        """How many passes have been recorded. One that records takes far longer than a replay, so
        its time says nothing of other passes."""
        recorded: int = getattr(self._decoder, "recordings", 0)
        return recorded

    def memory(self, pass_tokens: int, pass_rows: int) -> MemoryBudget:
        """What it holds when its cache is full, with passes no larger than this."""
        held = self._decoder.memory(pass_tokens, pass_rows, self.context_tokens)
        return MemoryBudget(*held, self.blocks.capacity_tokens)

    def is_sound(self) -> bool:
        """Whether a pass of one token, whose KV nobody reads, still goes through."""
        try:
            self.forward([Chunk(KvState([TRASH_BLOCK]), [0], 1)])
        except Exception:
            log.exception("not even a pass of one token succeeds")
            return False
        return True

    def free_unused(self) -> None:
        """Give memory that torch keeps for later back to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@torch.inference_mode()
def check_rows(decoder: TorchDecoder, model: LoadedModel, num_blocks: int) -> None:
    """Raise `ModelError` if some pass changes a token's logits, before `bitwise` is promised.

    Our kernels add in one fixed order, but a model calls other kernels too, and only the device can
    show what those do with another number of rows. So a few tokens go through the whole model in
    one pass, in pieces, and beside other sequences; a small cache gets fewer. Leaves it dirty.
    """
    vocab_size = model.folder.vocab_size
    ids = [(7 * i + 3) % vocab_size for i in range(min(sum(PIECES), model.folder.context_tokens))]

    def run(pieces: Sequence[int], companions: int) -> Tensor:
        kv, rows = KvState(blocks=[1]), []
        for size in pieces:
            fed = ids[kv.length : kv.length + size]
            chunks = [Chunk(kv, fed, len(fed))]
            chunks += [
                Chunk(KvState(blocks=[2 + i]), [(5 * i) % vocab_size], 1) for i in range(companions)
            ]
            batch = build_batch(chunks, BLOCK_SIZE, lambda count: count, model.device)
            rows.append(decoder.forward(batch)[: len(fed)].clone())
            kv.length += len(fed)
        return torch.cat(rows)

    whole = run([len(ids)], 0)
    company = min(COMPANIONS[model.device.type], num_blocks - 2)
    for pieces, companions in ((PIECES, 0), ([len(ids)], company)):
        if not torch.equal(run(pieces, companions), whole):
            raise ModelError(
                f"model `{model.folder.ref}` gives a token different bits in different passes on "
                f"`{model.device}`: use `exactness: fast`"
            )
