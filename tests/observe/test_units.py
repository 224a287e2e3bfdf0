"""Numbers read well: with their unit, and no more digits than mean something."""

from __future__ import annotations

import pytest

from specbatch.pipeline.observe.units import count, figure, percent, plural, seconds, usd, when


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"), (0, "$0"), (1234.5, "$1,234"), (12.345, "$12.35"), (0.0123456, "$0.0123"),
        (0.000714, "$0.000714"), (-0.5, "−\u2060$0.500"), (3e-9, "$3.0e-09"),
    ],
)  # fmt: skip
def test_dollars_have_three_digits_that_mean_something(value: float | None, shown: str) -> None:
    assert usd(value) == shown


def test_amounts_side_by_side_have_the_same_decimals() -> None:
    assert usd(7.3e-7, beside=0.000136) == "$0.000001"
    assert usd(0.5, beside=1234) == "$0"
    assert usd(-68.2e-6, beside=0.000136) == "−\u2060$0.000068"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0 s"), (2e-5, "20 µs"), (0.0021, "2.1 ms"), (0.85, "850 ms"), (12.34, "12.3 s"),
        (725, "12 min 5 s"), (240, "4 min"), (11520, "3 h 12 min"), (187200, "2 d 4 h"),
    ],
)  # fmt: skip
def test_seconds_are_in_the_unit_that_fits(value: float, shown: str) -> None:
    assert seconds(value).replace("\u00a0", " ") == shown


def test_other_numbers_have_their_unit() -> None:
    assert (count(1234567), count(None), figure(1.419)) == ("1,234,567", "–", "1.42")
    assert percent(0.6134) == "61.3\u00a0%"
    assert percent(-0.0001) == "0.0\u00a0%"
    assert (plural(1, "pass", "passes"), plural(2, "pass", "passes")) == ("1 pass", "2 passes")
    assert when(1_763_780_000) == "22 Nov 2025, 02:53:20 UTC"
