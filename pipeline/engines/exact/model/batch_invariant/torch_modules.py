"""Makes a loaded model batch-invariant on torch's own kernels, by replacing its parts.

Most matrix products are `nn.Linear`. GPT-2 has its own transposed form, and mixtures of experts
keep the weights of all experts in one parameter and give each expert as many rows as the router
happens to send it; both are first rewritten as linear layers, which run tile by tile
(`row_tiles.py`). Activations are replaced too. A model with a part that cannot be replaced is
refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import activations
from transformers.pytorch_utils import Conv1D

from specbatch.pipeline.engines.exact.model.batch_invariant.row_tiles import (
    RowTiles,
    TiledLinear,
    calibrate,
)
from specbatch.schemas.errors import ModelError

# Seen to compute each element alike wherever it stands.
_INVARIANT: tuple[type[nn.Module], ...] = (
    nn.ReLU,
    nn.Tanh,
    activations.FastGELUActivation,
    activations.GELUActivation,
    activations.NewGELUActivation,
    activations.ReLUSquaredActivation,
)


def make_batch_invariant(module: nn.Module, ref: str) -> RowTiles:
    """Replace the products and activations of model `ref` in place; returns the tiles they share.

    Raises `ModelError` if a part computes in a way that is not known here.
    """
    rewrite(module)
    linears = [(n, m) for n, m in module.named_modules() if isinstance(m, nn.Linear)]
    routers = routers_of(module)
    tiles = calibrate([m for _, m in linears] + router_products(routers))
    for name, linear in linears:
        module.set_submodule(name, TiledLinear(linear, tiles))
    for name, router in routers:
        module.set_submodule(name, TiledRouter(router, tiles))
    refuse_batch_dependent(module, ref, (TiledLinear, nn.Embedding))
    return tiles


def rewrite(module: nn.Module) -> None:
    """Turn other products into linear layers, and activations into batch-invariant ones."""
    for name, part in list(module.named_modules()):
        if isinstance(part, Conv1D):
            module.set_submodule(name, _linear(part.weight.t().contiguous(), part.bias))
        elif _is_experts(part):
            module.set_submodule(name, Experts(part))
    for name, part in list(module.named_modules()):
        if is_activation(part):
            module.set_submodule(name, batch_invariant(part) or part)


def routers_of(module: nn.Module) -> list[tuple[str, Any]]:
    """The routers of a mixture of experts, by name."""
    return [(n, m) for n, m in module.named_modules() if type(m).__name__.endswith("TopKRouter")]


def router_products(routers: list[tuple[str, Any]]) -> list[nn.Linear]:
    """The linear layer inside each router."""
    return [_linear(router.weight) for _, router in routers]


def refuse_batch_dependent(module: nn.Module, ref: str, known: tuple[type[nn.Module], ...]) -> None:
    """Raise `ModelError` if a part has a matrix and is not `known`, or is an unknown activation."""
    for name, part in module.named_modules():
        if _is_batch_dependent(part, known) and not name.endswith(TiledRouter.WRAPPED):
            raise ModelError(
                f"model `{ref}` computes `{name}` ({type(part).__name__}) in a way whose bits may "
                "depend on the batch: use `exactness: fast`"
            )


class Experts(nn.Module):
    """Experts one by one, each on the rows sent to it; a row's shares are added in its own order.

    Takes the place of transformers' `*Experts`, which multiply all experts' rows in one call.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.gate_up = nn.ModuleList(_linear(weight) for weight in experts.gate_up_proj)
        self.down = nn.ModuleList(_linear(weight) for weight in experts.down_proj)
        self.act_fn = experts.act_fn

    def forward(self, rows: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """`rows` [T, hidden]; the experts `chosen` for each and their `shares`, both [T, k]."""
        count, k = chosen.shape
        expert_of = chosen.reshape(-1)
        outputs = torch.empty(count * k, rows.shape[1], dtype=torch.float32, device=rows.device)
        for expert in expert_of.unique().tolist():
            at = (expert_of == expert).nonzero()[:, 0]
            gate, up = self.gate_up[expert](rows[at // k]).chunk(2, dim=-1)
            outputs[at] = self.down[expert](self.act_fn(gate) * up).float()
        parts = (outputs.view(count, k, -1) * shares.float()[..., None]).unbind(dim=1)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total.to(rows.dtype)


class TiledRouter(nn.Module):
    """A router, which chooses each row's experts, run tile by tile."""

    WRAPPED = ".by_rows"

    def __init__(self, router: nn.Module, tiles: RowTiles) -> None:
        super().__init__()
        self.by_rows = router
        self._tiles = tiles

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Logits, shares and experts of every row."""
        rows = x.reshape(-1, x.shape[-1])
        cover = self._tiles.cover(rows.shape[0])
        padded = torch.cat((rows, rows.new_zeros(sum(cover) - rows.shape[0], rows.shape[1])))
        outputs = [self.by_rows(tile) for tile in padded.split(cover)]
        return tuple(torch.cat(each)[: rows.shape[0]] for each in zip(*outputs, strict=True))


def _is_experts(part: nn.Module) -> bool:
    """Gated experts without biases, their weights [experts, out, in]."""
    weights = (getattr(part, name, None) for name in ("gate_up_proj", "down_proj"))
    return (
        all(isinstance(weight, nn.Parameter) for weight in weights)
        and len(list(part.parameters())) == 2
        and not getattr(part, "is_transposed", False)
        and getattr(part, "is_concatenated", True)
    )


def _is_batch_dependent(part: nn.Module, known: tuple[type[nn.Module], ...]) -> bool:
    if is_activation(part):
        return batch_invariant(part) is None
    if isinstance(part, known):
        return False
    return any(parameter.ndim > 1 for parameter in part.parameters(recurse=False))


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer of these very tensors."""
    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


class BatchInvariantActivation(nn.Module):
    """An activation whose every element has the same bits wherever it stands in its tensor.

    torch computes most elements of a tensor in vectors and the rest, at its end or at the end of a
    thread's share, one by one; for SiLU and the tanh form of GELU the two differ in the last bit.
    The functions given here consist of operations for which they do not.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x.float()).to(x.dtype)


def batch_invariant(activation: nn.Module) -> nn.Module | None:
    """The batch-invariant form of one of transformers' activations; None if none is known."""
    if isinstance(activation, _INVARIANT):
        return activation
    if isinstance(activation, (nn.SiLU, activations.SiLUActivation)):
        return BatchInvariantActivation(_silu)
    if isinstance(activation, activations.GELUTanh):
        return BatchInvariantActivation(_gelu_tanh)
    return None


def is_activation(module: nn.Module) -> bool:
    """Whether a module is one of those that a config's activation names."""
    known = (c[0] if isinstance(c, tuple) else c for c in activations.ACT2CLS.values())
    return type(module) in set(known)


def _silu(x: Tensor) -> Tensor:
    return x / x.neg().exp_().add_(1.0)


def _gelu_tanh(x: Tensor) -> Tensor:
    inner = (x * x).mul_(x).mul_(0.044715).add_(x).mul_(math.sqrt(2.0 / math.pi))
    return inner.tanh_().add_(1.0).mul_(x).mul_(0.5)
