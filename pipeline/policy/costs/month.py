"""What devices cost this month, and what they will have cost at its end. Pure arithmetic.

All that was leased counts, idle time too: it is paid. The rest of the month is expected to go as
the four weeks before now, in which every weekday is as often as the others; where less is known, as
what is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from specbatch.schemas.days import DAY_SEC

USUAL_SEC = 28 * DAY_SEC
LEAST_SEC = DAY_SEC  # that must be known: an hour says little of a month


class LeasedTime(NamedTuple):
    """A device from when to when, in seconds since the epoch, at a price."""

    begin: float
    end: float
    usd_per_hour: float


@dataclass(frozen=True, slots=True)
class MonthSpend:
    """One month in UTC, as of a moment within it."""

    month: str  # 2026-01
    to_date_usd: float
    forecast_usd: float | None  # None: less than a day is known
    usual_usd_per_day: float | None  # that the forecast rests on
    limit_usd: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether the limit is passed, or will be."""
        if self.limit_usd is None:
            return False
        return max(self.to_date_usd, self.forecast_usd or 0.0) > self.limit_usd


def month_spend(
    leased: Sequence[LeasedTime], now: float, limit_usd: float | None = None
) -> MonthSpend:
    at = datetime.fromtimestamp(now, UTC)
    begin = datetime(at.year, at.month, 1, tzinfo=UTC)
    end = datetime(at.year + at.month // 12, at.month % 12 + 1, 1, tzinfo=UTC)
    to_date = _between(leased, begin.timestamp(), now)
    known = min(USUAL_SEC, now - min((one.begin for one in leased), default=now))
    forecast = usual = None
    if known >= LEAST_SEC:
        usual = _between(leased, now - known, now) / known * DAY_SEC
        forecast = to_date + usual * (end.timestamp() - now) / DAY_SEC
    return MonthSpend(f"{at:%Y-%m}", to_date, forecast, usual, limit_usd)


def _between(leased: Sequence[LeasedTime], begin: float, end: float) -> float:
    """Dollars of a span."""
    return sum(
        max(min(one.end, end) - max(one.begin, begin), 0.0) / 3600 * one.usd_per_hour
        for one in leased
    )
