"""Line charts as inline SVG that takes its colours from the page, so in light and in dark.

Values become places here; `charts.html` writes them down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined

Points = Sequence[tuple[float, float]]

_TEMPLATE = Path(__file__).with_name("charts.html")


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: series by name over the same axes."""

    title: str
    series: Mapping[str, Points]
    level: float | None = None  # a line across, to compare with


@dataclass(frozen=True, slots=True)
class Axes:
    """x from 0 to 1, y from 0 to a little more than the highest value, in units of the drawing."""

    most: float
    width: int = 260
    height: int = 200
    left: int = 34
    right: int = 252
    top: int = 22
    bottom: int = 166

    def x(self, value: float) -> float:
        return self.left + value * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - value / (self.most * 1.05) * (self.bottom - self.top)

    @property
    def ticks(self) -> list[float]:
        """Round values at which the grid has a line."""
        step = 0.5 if self.most < 4 else 1.0 if self.most < 8 else 2.0
        return [step * i for i in range(int(self.most / step) + 1)]


def charts(panels: Sequence[Panel], x_title: str, y_title: str, caption: str) -> str:
    """Charts beside each other with one scale, one legend and a caption, on one line of HTML."""
    most = max(y for panel in panels for points in panel.series.values() for _, y in points)
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    whole = environment.from_string(_TEMPLATE.read_text()).render(
        panels=panels, axes=Axes(most), x_title=x_title, y_title=y_title, caption=caption
    )
    return "".join(line.strip() for line in whole.splitlines())
