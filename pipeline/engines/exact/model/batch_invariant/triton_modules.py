"""Makes a loaded model batch-invariant on a GPU, by our kernels that add in one fixed order.

`torch_modules` runs a library's products on row counts that were seen to agree; this replaces the
products. Every shape is probed, and a model whose rows depend on the batch is refused.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from specbatch.kernels.linear.triton import linear as triton_linear
from specbatch.kernels.rms_norm.triton import rms_norm
from specbatch.pipeline.engines.exact.model.batch_invariant.row_tiles import calibrate, probe_agrees
from specbatch.pipeline.engines.exact.model.batch_invariant.torch_modules import (
    TiledRouter,
    refuse_batch_dependent,
    rewrite,
    router_products,
    routers_of,
)
from specbatch.schemas.errors import ModelError


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
    probed = set()
    for name, linear in linears:
        replaced = TritonLinear(linear)
        module.set_submodule(name, replaced)
        shape = (replaced.in_features, replaced.out_features, replaced.bias is not None)
        if shape not in probed and not probe_agrees(
            replaced, replaced.in_features, replaced.weight
        ):
            raise ModelError(
                f"model `{ref}` computes `{name}` with bits that depend on the number of rows "
                "on this device: use `exactness: fast`"
            )
        probed.add(shape)
    routers = routers_of(module)
    if routers:  # a product and a choice in one: run on row counts that agree
        tiles = calibrate(router_products(routers))
        for name, router in routers:
            module.set_submodule(name, TiledRouter(router, tiles))
    refuse_batch_dependent(module, ref, (TritonLinear, nn.Embedding))


class TritonLinear(nn.Module):
    """`nn.Linear` by our own kernel."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        return triton_linear(x, self.weight, self.bias)


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
