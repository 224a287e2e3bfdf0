"""What a job saved or lost against depth 0, and how sure that is.

Steps whose price at depth 0 is known from the job's own control windows say what they took, and
what their tokens would have taken. A group's sums of the two are one observation. Their ratio is
estimated as sums of all groups by each other, and its variance from what each group departs from
it: the ratio estimator of W. G. Cochran, Sampling Techniques (3rd ed., 1977), section 6.3, with
Student's t for n - 1 degrees of freedom. What was taken is known, so

    saved = (R - 1) taken,   R = Σ baseline / Σ taken
    var R = n / (n - 1) · Σ (baseline_g - R taken_g)² / (Σ taken)²

It does not know of errors that all groups share, such as a machine that was busier in the windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Student's t, two-sided 95 %, by degrees of freedom from 1.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL = 1.959964


@dataclass(frozen=True, slots=True)
class Savings:
    """Dollars saved by drafting; below zero they were lost. `low` to `high` is a 95 % interval."""

    usd: float
    low_usd: float | None  # None: one group tells nothing of others
    high_usd: float | None
    taken_usd: float  # by the measured steps
    speedup: float  # time at depth 0 by time taken, in money
    groups: int


def savings(groups: Sequence[tuple[float, float]]) -> Savings | None:
    """`groups`: (taken, baseline) of each, in dollars. None: nothing was measured."""
    taken = math.fsum(t for t, _ in groups)
    baseline = math.fsum(b for _, b in groups)
    if taken <= 0:
        return None
    ratio, n = baseline / taken, len(groups)
    saved, low, high = baseline - taken, None, None
    if n > 1:
        departed = math.fsum((b - ratio * t) ** 2 for t, b in groups)
        half = t95(n - 1) * math.sqrt(n / (n - 1) * departed)  # of R, times what was taken
        low, high = saved - half, saved + half
    return Savings(saved, low, high, taken, ratio, n)


def t95(degrees: int) -> float:
    """The 97.5 % point of Student's t."""
    if degrees <= len(_T95):
        return _T95[degrees - 1]
    # Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5: right to 1e-4 from here.
    z = _NORMAL
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
