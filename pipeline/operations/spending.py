"""The month's spend, from the sessions of all workers in the store."""

from __future__ import annotations

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


def sentence(spend: MonthSpend) -> str:
    """`$12.00 in 2026-01 so far, $31.50 expected at its end, limit $30.00: over it`."""
    said = f"${spend.to_date_usd:,.2f} in {spend.month} so far"
    if spend.forecast_usd is None:
        said += "; less than a day is known, so no forecast"
    else:
        said += f", ${spend.forecast_usd:,.2f} expected at its end"
    if spend.limit_usd is not None:
        said += f"; limit ${spend.limit_usd:,.2f}" + (": above it" if spend.is_over else "")
    return said
