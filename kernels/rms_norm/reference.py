"""Root-mean-square norm in plain torch: the definition, in the three forms that models use."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    x: Tensor,  # [..., width]
    weight: Tensor,  # [width]
    eps: float,
    offset: float = 0.0,  # added to the weight: 1 for Gemma
    round_first: bool = True,  # round to x's dtype before the weight, as Llama does, or after it
) -> Tensor:
    """x / sqrt(mean(x²) + eps) · (weight + offset), the mean in float32; x's shape and dtype."""
    values = x.float()
    normed = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    if round_first:
        normed = normed.to(x.dtype)
    return (normed.float() * (weight.float() + offset)).to(x.dtype)
