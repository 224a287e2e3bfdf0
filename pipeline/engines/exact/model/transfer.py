"""From the host to the device and back, with as few waits as can be."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbatch.kernels.verify.contract import Verdict


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device. On a GPU the copy is queued and the host goes on."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(verdict: Verdict) -> tuple[list[int], list[float], list[int]]:
    """(tokens, log-probabilities, accepted): the one place where a step waits for its device."""
    parts = (verdict.tokens, verdict.logprobs, verdict.accepted)
    if verdict.tokens.device.type == "cpu":
        tokens, logprobs, accepted = (part.tolist() for part in parts)
        return tokens, logprobs, accepted
    # One copy; float64 holds a float32 as it is, and its bits pass for an integer.
    rows = verdict.tokens.shape[0]
    bits = verdict.logprobs.double().view(torch.int64)
    joined = torch.cat((verdict.tokens, bits, verdict.accepted)).cpu().numpy()
    logprobs = joined[rows : 2 * rows].view(np.float64).tolist()
    return joined[:rows].tolist(), logprobs, joined[2 * rows :].tolist()
