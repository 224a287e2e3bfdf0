"""A model on Triton's kernels is refused `bitwise` when a part of it looks at its company."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from specbatch.pipeline.engines.exact.model.batch_invariant import triton_modules
from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.exact.model.runner import ModelRunner
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.schemas.errors import ModelError
from support.architectures import tiny_model
from support.devices import TRITON_DEVICE

pytestmark = pytest.mark.pipeline  # runs models


class Crowded(nn.Module):
    """A part that rounds otherwise above so many rows."""

    def __init__(self, inner: nn.Module, most: int) -> None:
        super().__init__()
        self.inner, self.most = inner, most

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out * (1 + 1e-6) if x.shape[-2] > self.most else out


@pytest.mark.parametrize(
    ("most", "refused"),
    [(1000, False), (5, True), (12, True)],
    ids=["invariant", "pieces", "company"],
)
def test_a_part_that_depends_on_its_company_is_found(
    tmp_path: Path, most: int, refused: bool
) -> None:
    folder = inspect_model(str(tiny_model("llama", tmp_path)))
    model = load_model(folder, "float32", device=TRITON_DEVICE, kernels="triton")
    module: Any = model.module
    module.model.norm = Crowded(module.model.norm, most)
    if refused:
        with pytest.raises(ModelError, match="gives a token different bits in different passes"):
            ModelRunner(model, 16 << 20)
    else:
        ModelRunner(model, 16 << 20)
    ModelRunner(replace(model, exactness="fast"), 16 << 20)  # promises nothing


def test_a_product_that_depends_on_its_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def hurried(x: Tensor, weight: Tensor, _bias: Tensor | None, _tile: object) -> Tensor:
        order = slice(None) if x.shape[0] > 3 else slice(None, None, 2)
        rest = slice(1, None, 2)
        out = x[:, order] @ weight[:, order].t()
        return out if x.shape[0] > 3 else out + x[:, rest] @ weight[:, rest].t()

    monkeypatch.setattr(triton_modules, "linear_in_tiles", hurried)
    linear = nn.Linear(64, 32, bias=False).requires_grad_(False)
    with pytest.raises(ModelError) as caught:
        triton_modules.make_batch_invariant(nn.Sequential(linear), "odd")
    assert str(caught.value) == (
        "model `odd` computes `0` with bits that depend on the number of rows on this device: "
        "use `exactness: fast`"
    )
