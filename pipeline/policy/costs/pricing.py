"""What device time costs.

Money is exact: a price is a whole number, millionths of a dollar for an hour of the device, and
time is in whole ticks. Their product counts in units, of which `UNITS_PER_USD` make a dollar; sums
of it add up to the last unit. Dollars are for showing.
"""

from __future__ import annotations

from collections.abc import Mapping

from specbatch.schemas.placement import DEFAULT_POOL
from specbatch.schemas.timekeeping import Device, usd_of
from specbatch.schemas.usage import PRICE_NAMES

__all__ = [
    *("UNITS_PER_USD", "cost_units", "device_usd", "price_microusd", "priced", "unit_prices"),
    "usd_of",
]

MICROUSD_PER_USD = 1_000_000


def device_usd(seconds: float, usd_per_hour: float) -> float:
    """Price of `seconds` of a device at `usd_per_hour`."""
    return seconds * usd_per_hour / 3600.0


def price_microusd(usd_per_hour: float) -> int:
    """The price as it is recorded."""
    return round(usd_per_hour * MICROUSD_PER_USD)


def unit_prices(book: Mapping[str, float]) -> dict[str, int]:
    """What the price book says of `PRICE_NAMES`, as it is recorded."""
    return {name: price_microusd(book[name]) for name in PRICE_NAMES if book.get(name)}


def cost_units(ticks: int, price_microusd: int) -> int:
    """What so many ticks cost, exactly."""
    return ticks * price_microusd


def priced(
    kind: str,
    region: str,
    tenure: str,
    book: Mapping[str, float],
    otherwise_usd: float,
    devices: int = 1,
    pool: str = DEFAULT_POOL,
    is_otherwise_known: bool = False,
) -> Device:
    """So many alike devices that work as one, with their price together.

    `book` has dollars per hour by kind/region/tenure. `is_otherwise_known`: somebody has said that
    other devices cost `otherwise_usd`; this counts where the book has no devices at all.
    """
    name = f"{kind}/{region}/{tenure}"
    each = price_microusd(book.get(name, otherwise_usd))
    is_known = name in book or (is_otherwise_known and not any("/" in one for one in book))
    return Device(kind, region, tenure, devices * each, pool, each if is_known else None)
