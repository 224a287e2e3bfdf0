"""Prices of device time."""

from __future__ import annotations

import pytest

from specbatch.pipeline.policy.pricing import device_usd


@pytest.mark.parametrize(
    ("seconds", "usd_per_hour", "usd"), [(3600, 2.5, 2.5), (1, 3.6, 0.001), (0, 9, 0), (90, 0, 0)]
)
def test_device_time_is_priced_by_the_hour(seconds: float, usd_per_hour: float, usd: float) -> None:
    assert device_usd(seconds, usd_per_hour) == pytest.approx(usd)
