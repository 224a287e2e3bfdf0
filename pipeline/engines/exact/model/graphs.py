"""Records passes as CUDA graphs and replays them: a step's thousand launches become one.

A recorded pass reads and writes the same memory every time, and has the same shape. So a batch is
padded to a bucket of tokens and one of logit rows, copied into static buffers, and the bucket's
recording is replayed over them; it is made when the bucket is first met. Padding writes its KV to
the trash block, attends to nothing, and its logits are nobody's. Longer passes (chunks of prompts)
run as they are: they have work enough to hide their launches.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specbatch.kernels.decoder.contract import DecoderBatch
from specbatch.kernels.paged_attention.contract import RaggedBatch
from specbatch.kernels.paged_attention.triton import PREPARED, Tiles, prepare
from specbatch.pipeline.engines.exact.model.loaded_model import LoadedModel
from specbatch.pipeline.engines.exact.model.torch_decoder import TorchDecoder

log = logging.getLogger(__name__)

TOKEN_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
ROW_BUCKETS = (8, 32, 128, 512)
# Rotary tables that need no look at the positions, which would be a wait for the device.
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")

# Makes of a pass what runs it again over the same memory, and says where its result will lie.
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


class CudaCapture:
    """Records CUDA graphs, which share one pool of memory: only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        # Once beforehand, aside: kernels are compiled and libraries make their workspaces.
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = run()
        return graph.replay, out


def why_not(model: LoadedModel) -> str | None:
    """Why a model's passes cannot be recorded; None when they can."""
    if model.kernels != "triton":
        return "its attention works on the host"
    module: Any = model.module
    config = module.config
    if any(type(m).__name__.endswith("TopKRouter") for m in module.modules()):
        return "its experts are called by what the host knows of the rows"
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    kinds = {part["rope_type"] for part in parts if "rope_type" in part}
    if kinds - set(_STATIC_ROPE):
        return f"rope type {', '.join(sorted(kinds))} looks at the positions"
    return None


class GraphedDecoder:
    """A decoder whose shorter passes are recorded. Its logits are overwritten by its next pass."""

    def __init__(
        self, decoder: TorchDecoder, capture: Capture, device: torch.device, table_blocks: int
    ) -> None:
        """`table_blocks` is the most that one sequence's block table holds."""
        self._decoder, self._capture = decoder, capture
        most = TOKEN_BUCKETS[-1]

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._ids, self._positions, self._slots = zeros(most), zeros(most), zeros(most)
        self._logit_rows = zeros(ROW_BUCKETS[-1])
        self._tiles = zeros(most, 4, dtype=torch.int32)
        self._tables = zeros(most * table_blocks, dtype=torch.int32)
        self._recorded: dict[tuple[int, int], tuple[Callable[[], None], Tensor]] = {}
        self._unrecordable: set[tuple[int, int]] = set()

    @property
    def recordings(self) -> int:
        """How many passes have been recorded, or failed to be."""
        return len(self._recorded) + len(self._unrecordable)

    def memory(self, tokens: int, rows: int, context: int) -> tuple[int, int, int]:
        """As `TorchDecoder.memory`, with what recordings of such passes keep.

        They have the static buffers in common, and each its float32 logits for itself.
        """
        static = [self._ids, self._positions, self._slots]
        static += [self._logit_rows, self._tiles, self._tables]
        kept = sum(size for _, size in _reachable(tokens, rows)) * self._decoder.vocab_size * 4
        weights, cache_bytes, work = self._decoder.memory(tokens, rows, context)
        return weights, cache_bytes, work + sum(buffer.nbytes for buffer in static) + kept

    def forward(self, batch: DecoderBatch) -> Tensor:
        """As `TorchDecoder.forward`, for a batch that is padded to its buckets."""
        tokens, rows = len(batch.ids), len(batch.logit_rows)
        key = (tokens, rows)
        if tokens not in TOKEN_BUCKETS or rows not in ROW_BUCKETS or key in self._unrecordable:
            return self._decoder.forward(batch)
        prepared = prepare(batch.ragged, batch.ids.device, least_tiles=tokens)
        if len(prepared.tables) > len(self._tables):
            return self._decoder.forward(batch)
        # 1) The batch goes to where the recording reads it.
        self._ids[:tokens].copy_(batch.ids)
        self._positions[:tokens].copy_(batch.positions)
        self._slots[:tokens].copy_(batch.ragged.slots)
        self._logit_rows[:rows].copy_(batch.logit_rows)
        self._tiles[:tokens].copy_(prepared.tiles)
        self._tables[: len(prepared.tables)].copy_(prepared.tables)
        # 2) Record what is new; replay.
        if key not in self._recorded and not self._record(tokens, rows):
            return self._decoder.forward(batch)
        replay, logits = self._recorded[key]
        replay()
        return logits

    def _record(self, tokens: int, rows: int) -> bool:
        """False: such passes cannot be recorded, from now on they run as they are."""
        log.info("recording a pass of %d tokens and %d logit rows", tokens, rows)
        static = self._static(tokens, rows)
        try:
            self._recorded[tokens, rows] = self._capture(lambda: self._decoder.forward(static))
        except Exception:  # of the driver, or memory: the pass itself says whether it can run
            self._unrecordable.add((tokens, rows))
            said = "a pass of %d tokens and %d logit rows cannot be recorded, it runs as it is"
            log.warning(said, tokens, rows, exc_info=True)
            return False
        return True

    def _static(self, tokens: int, rows: int) -> DecoderBatch:
        """The buffers as a batch. Nothing of it lies on the host."""
        return DecoderBatch(
            ids=self._ids[:tokens],
            positions=self._positions[:tokens],
            ragged=RaggedBatch(
                query_starts=[],
                context_lens=[],
                block_tables=[],
                slots=self._slots[:tokens],
                prepared={PREPARED: Tiles(self._tiles[:tokens], self._tables)},
            ),
            logit_rows=self._logit_rows[:rows],
        )


def _reachable(tokens: int, rows: int) -> list[tuple[int, int]]:
    """The buckets that passes of at most so many tokens and logit rows can fall into."""
    most_tokens = bucket(TOKEN_BUCKETS, tokens)
    return [
        (count, size)
        for count in TOKEN_BUCKETS
        if count <= most_tokens
        for size in ROW_BUCKETS
        if size <= bucket(ROW_BUCKETS, min(rows, count))  # no token has two rows
    ]


def bucket(buckets: tuple[int, ...], count: int) -> int:
    """The one of so many tokens or logit rows; what is more than all of them keeps its number."""
    at = bisect_left(buckets, count)
    return buckets[at] if at < len(buckets) else count
