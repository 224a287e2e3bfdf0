"""Line charts as inline SVG that takes its colours from the page, so in light and in dark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 260, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 34, 8, 22, 34


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: series by name over the same axes."""

    title: str
    series: Mapping[str, Points]
    level: float | None = None  # a line across, to compare with


def charts(panels: Sequence[Panel], x_title: str, y_title: str, caption: str) -> str:
    """Charts beside each other with one scale, one legend and a caption."""
    most = max(y for panel in panels for points in panel.series.values() for _, y in points)
    names = list(panels[0].series)
    drawn = "".join(_drawn(panel, x_title, y_title, most) for panel in panels)
    legend = "".join(
        f'<span class="key"><i class="line s{i}"></i>{escape(name)}</span>'
        for i, name in enumerate(names)
    )
    return (
        f'<figure class="charts"><div class="panels">{drawn}</div>'
        f'<div class="legend">{legend}</div><figcaption>{escape(caption)}</figcaption></figure>'
    )


def _drawn(panel: Panel, x_title: str, y_title: str, most: float) -> str:
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(panel.title)}">',
        f'<text class="title" x="{_LEFT}" y="14">{escape(panel.title)}</text>',
        *_grid(most),
        f'<text class="axis" x="{(_LEFT + _WIDTH - _RIGHT) / 2:.0f}" y="{_HEIGHT - 4}" '
        f'text-anchor="middle">{escape(x_title)}</text>',
        f'<text class="axis" x="10" y="{(_TOP + _HEIGHT - _BOTTOM) / 2:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 10 {(_TOP + _HEIGHT - _BOTTOM) / 2:.0f})">{escape(y_title)}</text>',
    ]
    if panel.level is not None:
        y = _y(panel.level, most)
        parts.append(f'<path class="level" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
    # The first series is the one that matters: it is drawn last, over the others.
    for i, points in reversed(list(enumerate(panel.series.values()))):
        path = "L".join(f"{_x(x):.1f} {_y(y, most):.1f}" for x, y in points)
        parts.append(f'<path class="line s{i}" d="M{path}"/>')
        parts += [
            f'<circle class="s{i}" cx="{_x(x):.1f}" cy="{_y(y, most):.1f}" r="2.2"/>'
            for x, y in points
        ]
    return "".join([*parts, "</svg>"])


def _grid(most: float) -> Iterator[str]:
    step = 0.5 if most < 4 else 1.0 if most < 8 else 2.0
    ticks = [step * i for i in range(int(most / step) + 1)]
    for value in ticks:
        y = _y(value, most)
        yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
        yield f'<text x="{_LEFT - 4}" y="{y + 3:.1f}" text-anchor="end">{value:g}</text>'
    for value in (0.0, 0.5, 1.0):
        yield (
            f'<text x="{_x(value):.1f}" y="{_HEIGHT - _BOTTOM + 12}" '
            f'text-anchor="middle">{value:g}</text>'
        )


def _x(value: float) -> float:
    return _LEFT + value * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float, most: float) -> float:
    return _HEIGHT - _BOTTOM - value / (most * 1.05) * (_HEIGHT - _TOP - _BOTTOM)
