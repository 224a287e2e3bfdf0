"""Prices of device time."""

from __future__ import annotations

import pytest

from specbatch.pipeline.policy.costs.pricing import cost_units, device_usd, price_microusd
from specbatch.schemas.provenance import TICKS_PER_SEC
from specbatch.schemas.timekeeping import usd_of


@pytest.mark.parametrize(
    ("seconds", "usd_per_hour", "usd"), [(3600, 2.5, 2.5), (1, 3.6, 0.001), (0, 9, 0), (90, 0, 0)]
)
def test_device_time_is_priced_by_the_hour(seconds: float, usd_per_hour: float, usd: float) -> None:
    assert device_usd(seconds, usd_per_hour) == pytest.approx(usd)


def test_costs_in_units_add_up_to_the_last_one() -> None:
    price = price_microusd(0.37)
    assert price == 370_000
    parts = [cost_units(ticks, price) for ticks in (1, 2, 3 * 10**9 + 1)]
    assert sum(parts) == cost_units(3 * 10**9 + 4, price)
    assert usd_of(cost_units(3600 * TICKS_PER_SEC, price)) == 0.37
