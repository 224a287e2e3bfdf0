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

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sampler:
    """The two entry points, as `kernels.verify.reference` defines them."""

    name: str
    verify: Callable[[Tensor, Tensor, Tensor, Tensor, SamplingRows], Verdict]
    sample: Callable[[Tensor, Tensor, SamplingRows], Tensor]


@lru_cache(maxsize=4)
def choose_sampler(device: torch.device) -> Sampler:
    """C on processors that have a compiler, plain torch elsewhere."""
    if device.type == "cpu":
        try:
            library()
        except NativeUnavailableError as reason:
            log.info("sampling in torch: %s", reason)
        else:
            return Sampler("native", cpu.verify, cpu.sample)
    return Sampler("torch", reference.verify, reference.sample)
