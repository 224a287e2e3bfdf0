"""Step time: a line through what was measured, sane even where the measurements are not."""

from __future__ import annotations

import random

import pytest

from specbatch.pipeline.policy.step_time import StepTime


def fitted(rows: list[int], base: float, per_row: float, noise: float = 0.0) -> StepTime:
    generator, model = random.Random(3), StepTime()
    for n in rows:
        model.observe(n, (base + per_row * n) * (1 + noise * generator.uniform(-1, 1)))
    return model


def test_a_line_is_found_exactly() -> None:
    model = fitted([1, 64, 10, 200, 64], base=3e-3, per_row=2e-5)
    assert model.base_sec == pytest.approx(3e-3)
    assert model.row_sec == pytest.approx(2e-5)
    assert model.predict(1000) == pytest.approx(23e-3)
    assert model.observations == 5


def test_noise_is_averaged_out() -> None:
    rows = [random.Random(4).randint(1, 300) for _ in range(1)] + list(range(1, 300, 3)) * 3
    model = fitted(rows, base=3e-3, per_row=2e-5, noise=0.3)
    for n in (1, 64, 256):
        assert model.predict(n) == pytest.approx(3e-3 + 2e-5 * n, rel=0.15)


def test_one_number_of_rows_tells_only_of_itself() -> None:
    """The prior's slope splits the time; the prediction there is right at once."""
    model = fitted([64] * 20, base=5e-3, per_row=5e-5)
    assert model.predict(64) == pytest.approx(5e-3 + 64 * 5e-5)
    assert model.row_sec == pytest.approx(5e-5)


def test_no_part_of_a_cost_is_negative() -> None:
    """Fewer rows took longer (a cold cache, a neighbour): no gain is made of that."""
    model = StepTime()
    for rows, seconds in [(10, 0.05), (100, 0.01), (200, 0.005), (1, 0.09)]:
        model.observe(rows, seconds)
        assert model.base_sec >= 0
        assert model.row_sec >= 0
        assert model.predict(50) > 0


def test_superlinear_steps_leave_no_negative_base() -> None:
    model = StepTime()
    for rows in (1, 10, 100, 1000) * 5:
        model.observe(rows, 1e-6 * rows**2)
    assert model.base_sec >= 0
    assert model.predict(1000) > model.predict(10)


def test_old_measurements_are_forgotten() -> None:
    model = fitted([1, 50, 100] * 50, base=10e-3, per_row=1e-4)
    for _ in range(150):
        for rows in (1, 50, 100):
            model.observe(rows, 1e-3 + 1e-5 * rows)
    assert model.base_sec == pytest.approx(1e-3, rel=0.05)
    assert model.row_sec == pytest.approx(1e-5, rel=0.05)


def test_before_any_measurement_the_prior_speaks() -> None:
    assert StepTime(base_sec=1.0, row_sec=0.5).predict(4) == 3.0


def test_a_slope_is_known_only_after_passes_of_different_sizes() -> None:
    model = StepTime()
    for _ in range(20):
        model.observe(32, 4e-3)
    assert not model.has_slope
    model.observe(48, 5e-3)
    assert model.has_slope
