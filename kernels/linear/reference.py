"""A linear layer in plain torch: the definition."""

from __future__ import annotations

from torch import Tensor


def linear(
    x: Tensor,  # [..., inputs]
    weight: Tensor,  # [outputs, inputs], of x's dtype
    bias: Tensor | None = None,  # [outputs]
) -> Tensor:
    """Products and sums in float32, rounded once; output [..., outputs] in x's dtype."""
    out = x.float() @ weight.float().t()
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)
