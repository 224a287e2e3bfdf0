"""What device time costs."""

from __future__ import annotations


def device_usd(seconds: float, usd_per_hour: float) -> float:
    """Price of `seconds` of a device at `usd_per_hour`."""
    return seconds * usd_per_hour / 3600.0
