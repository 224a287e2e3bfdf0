"""Activations whose every element has the same bits wherever it stands in its tensor.

torch computes most elements of a tensor in vectors and the rest, at its end or at the end of a
thread's share, one by one; for SiLU and the tanh form of GELU the two differ in the last bit. The
forms here consist of operations for which they do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn
from transformers import activations

# Seen to be steady as they are.
_STEADY: tuple[type[nn.Module], ...] = (
    nn.ReLU,
    nn.Tanh,
    activations.FastGELUActivation,
    activations.GELUActivation,
    activations.NewGELUActivation,
    activations.ReLUSquaredActivation,
)


class SteadyActivation(nn.Module):
    """An activation computed in float32 by steady operations."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x.float()).to(x.dtype)


def steady(activation: nn.Module) -> nn.Module | None:
    """The steady form of one of transformers' activations, or None if it has none here."""
    if isinstance(activation, _STEADY):
        return activation
    if isinstance(activation, (nn.SiLU, activations.SiLUActivation)):
        return SteadyActivation(_silu)
    if isinstance(activation, activations.GELUTanh):
        return SteadyActivation(_gelu_tanh)
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
