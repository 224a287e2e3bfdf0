"""The month's spend and its forecast."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from specbatch.pipeline.policy.costs.month import LeasedTime, month_spend
from specbatch.schemas.days import DAY_SEC


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


NOW = at("2026-01-11T00:00")  # ten days are over, 21 are to come


def nightly(usd: float, days: int) -> list[LeasedTime]:
    """An hour each midnight for so many days."""
    begins = [NOW - (n + 1) * DAY_SEC for n in range(days)]
    return [LeasedTime(begin, begin + 3600, usd) for begin in begins]


def test_the_rest_of_the_month_goes_as_the_last_four_weeks() -> None:
    found = month_spend(nightly(2.0, 60), NOW, limit_usd=61.0)
    assert (found.month, found.to_date_usd, found.usual_usd_per_day) == ("2026-01", 20.0, 2.0)
    assert found.forecast_usd == pytest.approx(62.0)
    assert found.is_over
    assert not month_spend(nightly(2.0, 60), NOW, limit_usd=63.0).is_over
    assert not month_spend(nightly(2.0, 60), NOW).is_over


def test_where_less_is_known_that_is_the_measure() -> None:
    found = month_spend(nightly(3.0, 5), NOW)
    assert found.forecast_usd == pytest.approx(15.0 + 21 * 3.0)


def test_an_hour_says_nothing_of_a_month_and_spent_money_is_over_a_limit_all_the_same() -> None:
    begun = [LeasedTime(NOW - 3600, NOW, 50.0)]
    found = month_spend(begun, NOW, limit_usd=40.0)
    assert (found.to_date_usd, found.forecast_usd, found.is_over) == (50.0, None, True)
    assert month_spend([], NOW, 0.0).to_date_usd == 0.0
    assert not month_spend([], NOW, 0.0).is_over


def test_a_session_over_the_month_s_end_counts_by_its_parts() -> None:
    long = [LeasedTime(at("2025-12-31T22:00"), at("2026-01-01T03:00"), 1.0)]
    assert month_spend(long, NOW).to_date_usd == 3.0
    december = month_spend(long, at("2025-12-31T23:00"))
    assert (december.month, december.to_date_usd) == ("2025-12", 1.0)


def test_in_december_the_rest_of_the_year_is_to_come() -> None:
    now = at("2026-12-11T00:00")
    days = [now - (n + 1) * DAY_SEC for n in range(40)]
    found = month_spend([LeasedTime(begin, begin + 3600, 2.0) for begin in days], now)
    assert (found.month, found.to_date_usd) == ("2026-12", 20.0)
    assert found.forecast_usd == pytest.approx(20.0 + 21 * 2.0)
