"""An element's bits do not depend on where it stands."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from specbatch.pipeline.engines.exact.model.batch_invariant.torch_modules import (
    batch_invariant,
    is_activation,
)

NAMES = (
    *("silu", "swish", "gelu_pytorch_tanh"),
    *("gelu", "gelu_new", "gelu_fast", "relu", "relu2", "tanh"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", NAMES)
def test_an_element_has_the_same_bits_in_every_place(name: str, dtype: torch.dtype) -> None:
    usual = ACT2FN[name]
    assert is_activation(usual)
    activation = batch_invariant(usual)
    assert activation is not None
    x = (3 * torch.randn(4096, generator=torch.Generator().manual_seed(0))).to(dtype)
    whole = activation(x)
    assert whole.dtype == dtype
    for length in range(1, 4096, 5):
        assert torch.equal(activation(x[-length:].clone()), whole[-length:])
    torch.testing.assert_close(
        whole, usual(x), rtol=1e-2, atol=1e-5 if dtype.itemsize > 2 else 1e-2
    )


@pytest.mark.parametrize("name", ["mish", "quick_gelu", "xielu"])
def test_others_are_not_called_batch_invariant(name: str) -> None:
    assert is_activation(ACT2FN[name])
    assert batch_invariant(ACT2FN[name]) is None


@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_extremes(name: str) -> None:
    activation, x = (
        batch_invariant(ACT2FN[name]),
        torch.tensor([-3e4, -100.0, 0.0, 100.0, 3e4, torch.nan]),
    )
    assert activation is not None
    torch.testing.assert_close(activation(x), ACT2FN[name](x), equal_nan=True)
