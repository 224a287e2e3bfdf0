"""What device time costs.

Money is exact: a price is a whole number, millionths of a dollar for an hour of the device, and
time is in whole ticks. Their product counts in units, of which `UNITS_PER_USD` make a dollar; sums
of it add up to the last unit. Dollars are for showing.
"""

from __future__ import annotations

from specbatch.schemas.provenance import TICKS_PER_SEC

MICROUSD_PER_USD = 1_000_000
UNITS_PER_USD = MICROUSD_PER_USD * 3600 * TICKS_PER_SEC


def device_usd(seconds: float, usd_per_hour: float) -> float:
    """Price of `seconds` of a device at `usd_per_hour`."""
    return seconds * usd_per_hour / 3600.0


def price_microusd(usd_per_hour: float) -> int:
    """The price as it is recorded."""
    return round(usd_per_hour * MICROUSD_PER_USD)


def cost_units(ticks: int, price_microusd: int) -> int:
    """What so many ticks cost, exactly."""
    return ticks * price_microusd


def usd_of(units: int) -> float:
    """Units as dollars."""
    return units / UNITS_PER_USD
