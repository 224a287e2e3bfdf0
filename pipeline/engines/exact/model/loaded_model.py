"""A model in memory, and the kernels that its torch path runs with.

Triton is for GPUs. Its interpreter runs the same kernels on a processor, thousands of times slower:
that is for tests, and must be asked for by name.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor, nn

from specbatch.kernels.decoder.contract import DecoderShape, DecoderWeights
from specbatch.kernels.paged_attention import cpu, reference
from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.engines.exact.model.batch_invariant.row_tiles import RowTiles
from specbatch.schemas.errors import MissingExtraError, ModelError

log = logging.getLogger(__name__)

Kernels = Literal["torch", "triton"]
Attention = Callable[..., Tensor]  # as `kernels.paged_attention.reference` defines it


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what a runner must know of it."""

    folder: ModelFolder
    module: nn.Module | None  # of transformers, for the torch path
    dtype: torch.dtype
    device: torch.device
    native: tuple[DecoderShape, DecoderWeights] | None  # None: the torch path
    tiles: RowTiles | None  # of the torch path on a processor; None: passes are not padded
    kernels: Kernels  # of the torch path
    exactness: str
    num_layers: int
    num_kv_heads: int  # of this rank, where several share the model
    head_dim: int
    eos_ids: frozenset[int]

    @property
    def token_bytes(self) -> int:
        """What a token's keys and values take."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def choose_kernels(wanted: Literal["auto", "torch", "triton"], device: torch.device) -> Kernels:
    """`auto` is Triton on a GPU and torch elsewhere.

    Raises `MissingExtraError` without Triton, `ModelError` where it cannot run.
    """
    if wanted == "torch" or (wanted == "auto" and device.type != "cuda"):
        return "torch"
    if find_spec("triton") is None:
        raise MissingExtraError(
            "triton is not installed here, and a GPU needs its kernels: "
            "`pip install 'specbatch[gpu]'`"
        )
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ModelError(
            f"Triton kernels do not run on device `{device}`: use a GPU, or the kernels of torch"
        )
    log.info("kernels of Triton on %s", device)
    return "triton"


def attention_of(kernels: Kernels, device: torch.device) -> Attention:
    """The implementation of paged attention."""
    if kernels == "triton":
        from specbatch.kernels.paged_attention import triton

        return triton.paged_attention
    return cpu.paged_attention if device.type == "cpu" else reference.paged_attention
