"""Weights of eight bits, made on loading by torchao: half the memory, and half of what is read.

Only weights of linear layers (not those of experts, nor embeddings); products are of the model's
own dtype. A quantised model is another model: what it writes is recorded under another fingerprint.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from specbatch.schemas.errors import MissingExtraError
from specbatch.schemas.spec import Weights

if TYPE_CHECKING:  # `check_weights` is called where there is no torch
    from torch import nn


def quantise(module: nn.Module, weights: Weights) -> None:
    """Quantise in place. Raises `MissingExtraError` without torchao."""
    if weights == "as-is":
        return
    check_weights(weights)
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    make = {"int8": Int8WeightOnlyConfig, "fp8": Float8WeightOnlyConfig}[weights]
    quantize_(module, make(set_inductor_config=False))  # torch's global settings are not ours


def check_weights(weights: Weights) -> None:
    """Raise `MissingExtraError` when such weights cannot be made here."""
    if weights != "as-is" and find_spec("torchao") is None:
        raise MissingExtraError(
            f"weights of `{weights}` need torchao, which is not installed here: "
            "`pip install 'specbatch[quant]'`"
        )
