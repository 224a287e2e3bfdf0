"""Makes a loaded model batch-invariant on a GPU, by our kernels that add in one fixed order.

`torch_modules` runs a library's products on row counts that were seen to agree; this replaces the
products. Every shape is probed, and a model whose rows depend on the batch is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from specbatch.kernels.linear.triton import CONSTANT, TILES, Tile, linear_in_tiles, may_choose
from specbatch.kernels.rms_norm.triton import rms_norm
from specbatch.pipeline.engines.exact.model.batch_invariant.row_tiles import (
    calibrate,
    probe_agrees,
    telling,
)
from specbatch.pipeline.engines.exact.model.batch_invariant.torch_modules import (
    TiledRouter,
    refuse_batch_dependent,
    rewrite,
    router_products,
    routers_of,
)
from specbatch.schemas.errors import ModelError

log = logging.getLogger(__name__)


def make_batch_invariant(module: nn.Module, ref: str) -> None:
    """Replace the products and norms of model `ref` in place.

    Raises `ModelError` if a part computes in a way that is not known here, or whose bits are seen
    to depend on the number of rows.
    """
    rewrite(module)
    norms = [(n, m) for n, m in module.named_modules() if type(m).__name__.endswith("RMSNorm")]
    for name, norm in norms:
        module.set_submodule(name, TritonNorm(norm))
    linears = [(n, m) for n, m in module.named_modules() if isinstance(m, nn.Linear)]
    tile_of: dict[tuple[int, int, bool], Tile | None] = {}  # by shape
    for name, linear in linears:
        shape = (linear.in_features, linear.out_features, linear.bias is not None)
        if shape not in tile_of:
            rows = telling(linear)
            tile_of[shape] = _tile(linear, rows)
            if not probe_agrees(_product(linear, tile_of[shape]), rows):
                raise ModelError(
                    f"model `{ref}` computes `{name}` with bits that depend on the number of rows "
                    "on this device: use `exactness: fast`"
                )
        module.set_submodule(name, TritonLinear(linear, tile_of[shape]))
    routers = routers_of(module)
    if routers:  # a product and a choice in one: run on row counts that agree
        tiles = calibrate(router_products(routers))
        for name, router in routers:
            module.set_submodule(name, TiledRouter(router, tiles))
    refuse_batch_dependent(module, ref, (TritonLinear, nn.Embedding))


def _tile(linear: nn.Linear, rows: Tensor) -> Tile | None:
    """The tile to use at any number of rows; None where all tiles give the same bits."""
    if not may_choose(rows):
        return CONSTANT
    outputs = [_product(linear, tile)(rows) for tile in (CONSTANT, *TILES)]
    if all(torch.equal(out, outputs[0]) for out in outputs):
        return None
    log.warning("tiles of products differ in bits on this device: one tile for any number of rows")
    return CONSTANT


def _product(linear: nn.Linear, tile: Tile | None) -> Callable[[Tensor], Tensor]:
    """Its kernel, but for the bias's value: that would round away what the sums differ in."""
    bias = None if linear.bias is None else torch.zeros_like(linear.bias)
    return lambda rows: linear_in_tiles(rows, linear.weight, bias, tile)


class TritonLinear(nn.Module):
    """`nn.Linear` by our own kernel, in one tile or in the best for each number of rows."""

    def __init__(self, linear: nn.Linear, tile: Tile | None) -> None:
        super().__init__()
        self._tile = tile
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        return linear_in_tiles(x, self.weight, self.bias, self._tile)


class TritonNorm(nn.Module):
    """One of transformers' `*RMSNorm` by our own kernel."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        kind = type(norm).__name__
        self.weight = norm.weight
        self._eps = float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)
        # Gemma's weights are stored less one; it and OLMo 2 round after the weight.
        self._offset = 1.0 if kind.startswith("Gemma") else 0.0
        self._round_first = not kind.startswith(("Gemma", "Olmo2"))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self._eps, self._offset, self._round_first)
