"""Ratios of two sums, with 95 % intervals. Terms are independent of each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_Z = 1.96  # of a 95 % interval

Terms = Sequence[tuple[float, float]]  # what each adds to the upper and to the lower sum


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % interval. NaN without data, without bounds with one term."""

    value: float
    low: float
    high: float

    @property
    def words(self) -> str:
        """`1.234 (95 %: 1.1 to 1.368)`."""
        if math.isinf(self.low):
            return f"{self.value:,.3g} (one group)"
        return f"{self.value:,.4g} (95 %: {self.low:,.4g} to {self.high:,.4g})"


def interval_of(terms: Terms) -> Interval:
    """Of the ratio."""
    return interval(ratio(terms), influence(terms))


def ratio(terms: Terms) -> float:
    whole = sum(of for _, of in terms)
    return sum(part for part, _ in terms) / whole if whole else math.nan


def influence(terms: Terms) -> list[float]:
    """How far each term moves the ratio. Of two ratios with the same terms, the difference moves
    by the differences."""
    value, whole = ratio(terms), sum(of for _, of in terms)
    return [(part - value * of) / whole if whole else math.nan for part, of in terms]


def interval(value: float, influences: Sequence[float]) -> Interval:
    n = len(influences)
    if math.isnan(value):
        return Interval(value, value, value)
    if n < 2:
        return Interval(value, -math.inf, math.inf)
    half = _Z * math.sqrt(sum(moved * moved for moved in influences) * n / (n - 1))
    return Interval(value, value - half, value + half)


def share_of(part: int, whole: int) -> Interval:
    """Of a share of independent things that were drawn: Wilson's interval, which also holds near 0
    and 1 (Wilson 1927, J. Am. Stat. Assoc. 22)."""
    if not whole:
        return Interval(math.nan, math.nan, math.nan)
    share, squared = part / whole, _Z * _Z
    middle = (share + squared / (2 * whole)) / (1 + squared / whole)
    reach = math.sqrt(share * (1 - share) / whole + squared / (4 * whole * whole))
    reach *= _Z / (1 + squared / whole)
    return Interval(share, max(0.0, middle - reach), min(1.0, middle + reach))
