"""Rotary tables with the same bits on every processor.

The formulas are those of transformers (`modeling_rope_utils`). Powers and logarithms are made by
`decimal`, which rounds alike everywhere; library functions of torch and of C do not. All else is
single additions, multiplications and divisions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Context, Decimal
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbatch.kernels.native import library

# Tables that do not change with the length of the sequence.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_EXACT = Context(prec=40)
_Frequencies = np.ndarray[Any, np.dtype[np.float32]]


def tables(
    rope: Mapping[str, Any], head_dim: int, max_positions: int, positions: int
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of `positions` positions, float32 [positions, head_dim].

    `rope` are the model's rope parameters, of a type in `ROPE_TYPES`; `max_positions` is its
    config's `max_position_embeddings`.
    """
    frequencies, scaling = _frequencies(rope, head_dim, max_positions)
    cos, sin = torch.empty(2, positions, head_dim, dtype=torch.float32)
    periods = frequencies.ctypes.data
    half = head_dim // 2
    library().rotary(periods, positions, half, scaling, cos.data_ptr(), sin.data_ptr())
    return cos, sin


def _frequencies(
    rope: Mapping[str, Any], head_dim: int, max_positions: int
) -> tuple[_Frequencies, float]:
    """Angles per position, float32 [head_dim / 2], and what the tables are multiplied by."""
    periods = _powers(float(rope["rope_theta"]), head_dim)
    plain = np.float32(1) / periods
    match rope.get("rope_type", "default"):
        case "linear":
            return plain / np.float32(rope.get("factor", 1.0)), 1.0
        case "llama3":
            return _llama3(rope, plain), 1.0
        case "yarn":
            return _yarn(rope, head_dim, max_positions, periods)
    return plain, 1.0


def _powers(base: float, head_dim: int) -> _Frequencies:
    """base ** (2i / head_dim), rounded once."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = [_EXACT.power(Decimal(base), Decimal(float(e))) for e in exponents]
    return np.array([np.float32(float(power)) for power in powers], dtype=np.float32)


def _llama3(rope: Mapping[str, Any], plain: _Frequencies) -> _Frequencies:
    """Long waves are slowed by `factor`, short ones are left, those between are blended."""
    factor, low, high = (
        np.float32(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    context = float(rope["original_max_position_embeddings"])
    waves = np.float32(2 * math.pi) / plain
    slowed = np.where(waves > np.float32(context / float(low)), plain / factor, plain)
    share = (np.float32(context) / waves - low) / (high - low)
    blended = (np.float32(1) - share) * slowed / factor + share * slowed
    between = (waves >= np.float32(context / float(high))) & (
        waves <= np.float32(context / float(low))
    )
    found: _Frequencies = np.where(between, blended, slowed).astype(np.float32)
    return found


def _yarn(
    rope: Mapping[str, Any], head_dim: int, max_positions: int, periods: _Frequencies
) -> tuple[_Frequencies, float]:
    """Peng et al., arXiv 2309.00071: a ramp from extrapolated to interpolated frequencies."""
    original = float(rope["original_max_position_embeddings"])
    factor = float(rope.get("factor") or max_positions / original)
    base = float(rope["rope_theta"])

    def dimension(rotations: float) -> float:
        return head_dim * _log(original / (rotations * 2 * math.pi)) / (2 * _log(base))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    steps = np.arange(head_dim // 2, dtype=np.float32)
    ramp = np.clip((steps - np.float32(low)) / np.float32(high - low), 0, 1)
    keep = (np.float32(1) - ramp).astype(np.float32)
    interpolated = np.float32(1) / (np.float32(factor) * periods)
    found = interpolated * (np.float32(1) - keep) + np.float32(1) / periods * keep
    return found.astype(np.float32), _yarn_scaling(rope, factor)


def _yarn_scaling(rope: Mapping[str, Any], factor: float) -> float:
    given = rope.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and of_all:
        return _mscale(factor, mscale) / _mscale(factor, of_all)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * _log(factor) + 1.0


def _log(x: float) -> float:
    return float(_EXACT.ln(Decimal(x)))
