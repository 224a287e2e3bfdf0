"""What a forward pass costs: seconds = base + per_row · rows, fitted while it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepTime:
    """Least squares over (rows, seconds) with exponential forgetting and a weak prior.

    A slope needs passes of different sizes: until there are some, `has_slope` is false and the
    prior's is kept.
    """

    base_sec: float = 2e-3
    row_sec: float = 5e-5
    forgetting: float = 0.98
    observations: int = 0
    has_slope: bool = False
    _n: float = 0.0
    _x: float = 0.0
    _xx: float = 0.0
    _y: float = 0.0
    _xy: float = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        f = self.forgetting
        self._n = self._n * f + 1.0
        self._x = self._x * f + rows
        self._xx = self._xx * f + rows * rows
        self._y = self._y * f + seconds
        self._xy = self._xy * f + rows * seconds
        self.observations += 1
        self._fit()

    def predict(self, rows: float) -> float:
        return self.base_sec + self.row_sec * rows

    def _fit(self) -> None:
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        self.has_slope = spread > 1e-3 * max(mean_x, 1.0) ** 2
        if self.has_slope:
            slope = (self._xy / self._n - mean_x * mean_y) / spread
            # Neither part of a cost is negative; noise must not say so.
            self.row_sec = max(slope, 0.0)
        self.row_sec = min(self.row_sec, mean_y / max(mean_x, 1.0))
        self.base_sec = max(mean_y - self.row_sec * mean_x, 0.0)
