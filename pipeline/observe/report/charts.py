"""Charts of a report as shapes with their places; the templates write them as SVG.

Colours are classes, so that the page's style decides them for light, dark and paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specbatch.pipeline.observe.report.facts import Bar, Facts, Moment
from specbatch.pipeline.observe.units import clock, count, figure, percent, seconds, usd
from specbatch.schemas.job_figures import Savings
from specbatch.schemas.speculation import ALL_PROPOSERS, DecisionAction

FULL, HALF = 1040, 490  # units wide: about as many pixels on a usual screen
STOPS = (DecisionAction.OFF, DecisionAction.DISABLED, DecisionAction.SWITCHED_OFF)
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 10.0, 12.0, 44.0

Points = Sequence[tuple[float, float | None]]  # x between 0 and 1; without a value: left out


@dataclass(frozen=True, slots=True)
class Shape:
    """An element of SVG."""

    name: str
    attributes: Mapping[str, str | None]
    text: str = ""
    title: str = ""  # shown when it is pointed at


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing with its name for those who do not see it."""

    width: int
    height: int
    label: str
    shapes: tuple[Shape, ...]

    @property
    def is_wide(self) -> bool:
        return self.width == FULL


@dataclass(frozen=True, slots=True)
class Axes:
    """A plot with its grid: values of 0 to `top` upwards, x between 0 and 1."""

    top: float
    shown: Callable[[float], str]  # a value in words
    width: int = HALF
    height: int = 230

    @property
    def inner(self) -> float:
        return self.width - _LEFT - _RIGHT

    @property
    def plot(self) -> float:
        return self.height - _TOP - _BOTTOM

    def at(self, x: float, y: float) -> tuple[float, float]:
        return _LEFT + x * self.inner, _TOP + self.plot * (1 - y / self.top)

    def chart(self, label: str, axis: str, shapes: Sequence[Shape]) -> Chart:
        title = _text(axis, _LEFT + self.inner / 2, self.height - 4, "middle", "axis")
        return Chart(self.width, self.height, label, (*self._grid(), *shapes, title))

    def tick(self, said: str, x: float) -> Shape:
        """A word under the plot."""
        return _text(said, _LEFT + x * self.inner, _TOP + self.plot + 15, "middle")

    def _grid(self) -> list[Shape]:
        drawn = []
        for quarter in range(5):
            y = _TOP + self.plot * (1 - quarter / 4)
            drawn.append(_line(_LEFT, y, self.width - _RIGHT, y, "grid"))
            if quarter % 2 == 0:
                said = self.shown(self.top * quarter / 4)
                drawn.append(_text(said, _LEFT - 8, y + 4, "end"))
        return drawn


# --- kinds of charts --------------------------------------------------------------------------
def bars(values: Sequence[Bar], unit: str, axis: str, label: str, class_: str = "bar") -> Chart:
    """A histogram: how often each of some classes was met."""
    axes = Axes(nice_top(max((bar.value for bar in values), default=0)), count)
    step = 1 / max(len(values), 1)
    total = sum(bar.value for bar in values) or 1
    every = math.ceil(len(values) / 20)
    drawn = []
    for number, bar in enumerate(values):
        x, y = axes.at((number + 0.12) * step, bar.value)
        tall = _TOP + axes.plot - y
        said = f"{bar.name}: {count(bar.value)} {unit}, {percent(bar.value / total)}"
        height = max(tall, 1.0 if bar.value else 0.0)
        drawn.append(_rect(x, y, step * 0.76 * axes.inner, height, class_, said, rx="1.5"))
        if number % every == 0:
            drawn.append(axes.tick(bar.name, (number + 0.5) * step))
    return axes.chart(label, axis, drawn)


def line(
    axes: Axes,
    points: Points,
    ticks: Sequence[str],
    axis: str,
    label: str,
    marks: Sequence[Shape] = (),
    more: Sequence[Points] = (),
) -> Chart:
    """Values over x, with a word for each point. `more` are fainter lines."""
    drawn = list(marks)
    for number, series in enumerate(more):
        drawn.append(_path(axes, series, f"curve faint s{number}"))
    drawn.append(_path(axes, points, "curve"))
    radius = "3" if len(points) <= 60 else "2"
    for (x, y), said in zip(points, ticks, strict=True):
        if y is not None:
            cx, cy = axes.at(x, y)
            place = {"cx": _n(cx), "cy": _n(cy), "r": radius, "class": "dot"}
            drawn.append(Shape("circle", place, title=f"{said}: {axes.shown(y)}"))
    wide = 16 + 7 * max(map(len, ticks), default=0)
    every = max(1, math.ceil(len(points) * wide / axes.inner))
    for (x, _), said in list(zip(points, ticks, strict=True))[::every]:
        drawn.append(axes.tick(said, x))
    return axes.chart(label, axis, drawn)


def strip(parts: Sequence[tuple[str, float, str]], label: str) -> Chart:
    """One bar in parts: name, value, words. Parts too small to see have no name."""
    total = sum(value for _, value, _ in parts) or 1.0
    x, drawn = 0.0, []
    for name, value, words in parts:
        wide = FULL * value / total
        drawn.append(_rect(x, 0, max(wide - 1, 0), 32, f"k-{name}", f"{name}: {words}"))
        if wide > 8 * len(name) + 12:
            drawn.append(_text(name, x + 8, 21, "start", "on"))
        x += wide
    return Chart(FULL, 32, label, tuple(drawn))


# --- charts of a job --------------------------------------------------------------------------
def money(facts: Facts) -> Chart:
    """Kinds of device time by their cost; by their time where the device costs nothing."""
    if sum(part.usd for part in facts.parts):
        parts = [(part.kind, part.usd, usd(part.usd)) for part in facts.parts]
    else:
        parts = [(part.kind, part.sec, seconds(part.sec)) for part in facts.parts]
    return strip(parts, "cost by kind of device time")


def interval(saved: Savings) -> Chart:
    """What was saved as a dot with its interval, beside nothing."""
    low = saved.usd if saved.low_usd is None else saved.low_usd
    high = saved.usd if saved.high_usd is None else saved.high_usd
    reach = max(abs(low), abs(high), abs(saved.usd), 1e-12) * 1.12
    left, right = min(low, 0.0) and -reach, max(high, 0.0) and reach
    span = (right - left) or 1.0

    def at(value: float) -> float:
        return 30 + (FULL - 60) * (value - left) / span

    zero, shown = at(0.0), usd(saved.usd, saved.reach)
    word = "good" if saved.usd >= 0 else "bad"
    side, anchor = (6, "start") if zero < FULL / 2 else (-6, "end")
    point = {"cx": _n(at(saved.usd)), "cy": "30", "r": "7", "class": f"point {word}"}
    shapes = (
        _line(30, 30, FULL - 30, 30, "grid"),
        _line(zero, 10, zero, 50, "zero"),
        _text("$0: as without drafts", zero + side, 64, anchor),
        _rect(at(low), 25, at(high) - at(low), 10, f"range {word}", rx="5"),
        Shape("circle", point, title=shown),
        _text(shown, at(saved.usd), 16, "middle", "strong"),
    )
    label = f"saved {usd(saved.usd)}, 95 % interval {usd(low)} to {usd(high)}"
    return Chart(FULL, 70, label, shapes)


def acceptance_over_time(facts: Facts) -> Chart:
    """Of all drafts and of the first few sources, with decisions as marks."""
    moments, (first, span) = facts.over_time, _span(facts.over_time)
    xs = [(m.middle - first) / span for m in moments]
    axes = Axes(1.0, lambda y: percent(y, 0), FULL)
    more = []
    for name in facts.sources_drawn:
        counts = [m.by_source.get(name, (0, 0)) for m in moments]
        rates = [accepted / proposed if proposed else None for proposed, accepted in counts]
        more.append(list(zip(xs, rates, strict=True)))
    marks = []
    for decision in facts.decisions_drawn:
        x, _ = axes.at((decision.at - first) / span, 0)
        whose = "" if decision.proposer == ALL_PROPOSERS else f" {decision.proposer}"
        kind = "off" if decision.action in STOPS else "on"
        said = f"{clock(decision.at)} {decision.action}{whose}"
        marks.append(_line(x, _TOP - 6, x, _TOP + axes.plot, f"mark {kind}", said))
    return line(
        axes, list(zip(xs, [m.rate for m in moments], strict=True)),
        [clock(m.middle) for m in moments], "done at, UTC",
        "acceptance over the job's time", marks, more,
    )  # fmt: skip


def acceptance_by_night(facts: Facts) -> Chart:
    """Of draft models; a line where another one drafts."""
    nights = facts.nights
    axes = Axes(1.0, lambda y: percent(y, 0), FULL, 190)
    last = len(nights) - 1
    marks = []
    for number in range(1, len(nights)):
        if nights[number].model != nights[number - 1].model:
            x, _ = axes.at((number - 0.5) / last, 0)
            said = f"{nights[number].model} drafts"
            marks.append(_line(x, _TOP - 6, x, _TOP + axes.plot, "mark on", said))
    return line(
        axes, [(number / last, night.rate) for number, night in enumerate(nights)],
        [night.day for night in nights], "night, UTC", "acceptance of draft models by night", marks,
    )  # fmt: skip


def depth_over_time(facts: Facts) -> Chart:
    moments, (first, span) = facts.over_time, _span(facts.over_time)
    top = nice_top(max(m.depth or 0.0 for m in moments))
    return line(
        Axes(top, lambda y: figure(y, 1), FULL, 170),
        [((m.middle - first) / span, m.depth) for m in moments],
        [clock(m.middle) for m in moments], "done at, UTC", "depth over the job's time",
    )  # fmt: skip


def acceptance_by_position(facts: Facts) -> Chart:
    last = len(facts.positions) - 1
    return line(
        Axes(1.0, lambda y: percent(y, 0)),
        [(number / last, drafts.rate) for number, drafts in enumerate(facts.positions)],
        [drafts.name for drafts in facts.positions],
        "position in the draft", "acceptance by position in the draft",
    )  # fmt: skip


def queue_and_compute(facts: Facts) -> Chart:
    """Seconds in queue on those in compute, by when groups were done."""
    moments = facts.over_time
    most = max((m.queue_sec + m.compute_sec for m in moments), default=0)
    axes = Axes(nice_seconds(most), seconds)
    step = 1 / max(len(moments), 1)
    every = max(1, math.ceil(len(moments) / 5))
    drawn = []
    for number, moment in enumerate(moments):
        base = 0.0
        for name, value in (("compute", moment.compute_sec), ("queue", moment.queue_sec)):
            x, y = axes.at((number + 0.12) * step, base + value)
            tall = axes.plot * value / axes.top
            said = f"{clock(moment.begin)}: {seconds(value)} in {name}"
            drawn.append(_rect(x, y, step * 0.76 * axes.inner, tall, name, said))
            base += value
        if number % every == 0:
            drawn.append(axes.tick(clock(moment.begin), (number + 0.5) * step))
    return axes.chart("seconds in queue and in compute", "done at, UTC", drawn)


def _span(moments: Sequence[Moment]) -> tuple[float, float]:
    """Where the time begins, and how long it is."""
    return moments[0].begin, (moments[-1].end - moments[0].begin) or 1.0


# --- round numbers ----------------------------------------------------------------------------
def nice_top(value: float) -> float:
    """The next of 1, 2, 5 × 10ⁿ."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value * 0.9999)


def nice_seconds(value: float) -> float:
    """The next round time: minutes and hours are not decimal."""
    if value <= 60:
        return nice_top(value)
    steps = (120, 240, 600, 1200, 2400, 3600, 7200, 14_400, 28_800, 57_600, 86_400)
    return next((float(s) for s in steps if s >= value), 86_400 * nice_top(value / 86_400))


# --- shapes -----------------------------------------------------------------------------------
def _rect(
    x: float, y: float, width: float, height: float, class_: str, title: str = "",
    rx: str | None = None,
) -> Shape:  # fmt: skip
    place = {"x": _n(x), "y": _n(y), "width": _n(width), "height": _n(height)}
    return Shape("rect", {**place, "rx": rx, "class": class_}, title=title)


def _line(x1: float, y1: float, x2: float, y2: float, class_: str, title: str = "") -> Shape:
    place = {"x1": _n(x1), "x2": _n(x2), "y1": _n(y1), "y2": _n(y2)}
    return Shape("line", {**place, "class": class_}, title=title)


def _path(axes: Axes, points: Points, class_: str) -> Shape:
    places = [axes.at(x, y) for x, y in points if y is not None]
    drawn = "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in places) if places else ""
    return Shape("path", {"d": drawn, "class": class_})


def _text(said: str, x: float, y: float, anchor: str, class_: str | None = None) -> Shape:
    place = {"x": _n(x), "y": _n(y), "text-anchor": anchor, "class": class_}
    return Shape("text", place, text=said)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
