"""Prices of device time."""

from __future__ import annotations

import pytest

from specbatch.pipeline.policy.costs.pricing import (
    cost_units,
    device_usd,
    price_microusd,
    unit_prices,
)
from specbatch.schemas.provenance import TICKS_PER_SEC
from specbatch.schemas.settings import Settings
from specbatch.schemas.timekeeping import usd_of
from specbatch.schemas.usage import PARTS, UNIT_PRICES, Quantities, UnitPrice, cost_by_part


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


@pytest.mark.parametrize("price", UNIT_PRICES, ids=lambda price: price.name)
def test_each_price_is_for_so_many_of_its_counter_and_for_nothing_else(price: UnitPrice) -> None:
    used = Quantities(**{price.counter: price.per})
    parts = cost_by_part(used, {price.name: 4_000_000})
    assert {part: usd_of(units) for part, units in parts.items()} == {
        part: 4.0 * (part == price.part) for part in PARTS
    }
    one = Quantities(**{price.counter: 1})
    assert cost_by_part(one, {price.name: 1})[price.part] >= 1, "no use is too small to be paid"


def test_what_has_no_price_in_the_book_costs_nothing() -> None:
    book = Settings(price_book={"h200/eu/spot": 2.0, "cpu_hour": 0.05, "sent_gb": 0}).price_book
    prices = unit_prices(book)
    assert prices == {"cpu_hour": 50_000}
    used = Quantities(store_statements=10**9, object_reads=10**9, stored_bytes=10**15)
    assert sum(cost_by_part(used, prices).values()) == 0


def test_a_name_that_is_no_price_is_refused() -> None:
    with pytest.raises(ValueError, match="price_book"):
        Settings(price_book={"cpu_hours": 1.0})
