"""Chooses the implementation of verification, once, and logs the reason."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from specbatch.kernels.counters.cpu import gumbel
from specbatch.kernels.native import NativeUnavailableError, library
from specbatch.kernels.rejection.reference import verify_blocks, verify_tokens
from specbatch.kernels.verify import cpu, reference
from specbatch.kernels.verify.contract import SamplingRows, Verdict
from specbatch.pipeline.engines.exact.model.loaded_model import Kernels

_RatioTest = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, SamplingRows], Verdict]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sampler:
    """`verify` and `sample` of `kernels.verify.reference`, the two tests of `kernels.rejection`."""

    name: str
    verify: Callable[[Tensor, Tensor, Tensor, Tensor, SamplingRows], Verdict]
    sample: Callable[[Tensor, Tensor, SamplingRows], Tensor]
    verify_tokens: _RatioTest
    verify_blocks: _RatioTest


@lru_cache(maxsize=4)
def choose_sampler(device: torch.device, kernels: Kernels = "torch") -> Sampler:
    """Triton where the model runs with it, C on processors that have a compiler, else torch."""
    if kernels == "triton":
        from specbatch.kernels.verify import triton

        return Sampler("triton", triton.verify, triton.sample, verify_tokens, verify_blocks)
    if device.type == "cpu":
        try:
            library()
        except NativeUnavailableError as reason:
            log.info("sampling in torch: %s", reason)
        else:
            tests = (partial(test, noise=gumbel) for test in (verify_tokens, verify_blocks))
            return Sampler("native", cpu.verify, cpu.sample, *tests)
    return Sampler("torch", reference.verify, reference.sample, verify_tokens, verify_blocks)
