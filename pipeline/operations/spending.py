"""The month's spend, from the sessions of all workers in the store."""

from __future__ import annotations

import math

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.policy.costs.month import LeasedTime, MonthSpend, month_spend
from specbatch.schemas.timekeeping import SessionRow

_TICKS = 1e7  # in a second


def spend_of(store: Store, now: float, limit_usd: float | None = None) -> MonthSpend:
    return month_spend([_leased(one) for one in store.sessions()], now, limit_usd)


def _leased(session: SessionRow) -> LeasedTime:
    ticks = session.seen if session.leased is None else session.leased
    end = session.started_at + ticks / _TICKS
    return LeasedTime(session.started_at, end, session.device.price_microusd / 1e6)


def usd(value: float) -> str:
    """`$12.00`; of less than a dollar two digits that count, however small: `$0.00042`."""
    places = 2 if value >= 1 or not value else 1 - math.floor(math.log10(value))
    return f"${value:,.{max(2, places)}f}"


def sentence(spend: MonthSpend) -> str:
    """`$12.00 in 2026-01 so far, $31.50 expected at its end, limit $30.00: over it`."""
    said = f"{usd(spend.to_date_usd)} in {spend.month} so far"
    if spend.forecast_usd is None:
        said += "; less than a day is known, so no forecast"
    else:
        said += f", {usd(spend.forecast_usd)} expected at its end"
    if spend.limit_usd is not None:
        said += f"; limit {usd(spend.limit_usd)}" + (": above it" if spend.is_over else "")
    return said
