"""Which implementation of verification runs here. Chosen once, the reason logged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from specbatch.kernels.native import NativeUnavailableError, library
from specbatch.kernels.verify import cpu, reference
from specbatch.kernels.verify.contract import SamplingRows, Verdict
from specbatch.pipeline.engine.kernel_choice import Kernels

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sampler:
    """The two entry points, as `kernels.verify.reference` defines them."""

    name: str
    verify: Callable[[Tensor, Tensor, Tensor, Tensor, SamplingRows], Verdict]
    sample: Callable[[Tensor, Tensor, SamplingRows], Tensor]


@lru_cache(maxsize=4)
def choose_sampler(device: torch.device, kernels: Kernels = "torch") -> Sampler:
    """Triton where the model runs with it, C on processors that have a compiler, else torch."""
    if kernels == "triton":
        from specbatch.kernels.verify import triton

        return Sampler("triton", triton.verify, triton.sample)
    if device.type == "cpu":
        try:
            library()
        except NativeUnavailableError as reason:
            log.info("sampling in torch: %s", reason)
        else:
            return Sampler("native", cpu.verify, cpu.sample)
    return Sampler("torch", reference.verify, reference.sample)
