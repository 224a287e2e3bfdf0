"""Charts as inline SVG, and the table beside each that says the same in figures.

Colours are classes, so that the page's style decides them for light, dark and paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence

from specbatch.pipeline.observe.report.facts import Bar, Moment, Saved
from specbatch.pipeline.observe.report.markup import Html, join, tag
from specbatch.pipeline.observe.units import clock, count, percent, seconds, usd

FULL, HALF = 1040, 490  # units wide: about as many pixels on a usual screen
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 10.0, 12.0, 44.0
Shown = Callable[[float], str]


def figure(caption: str, drawing: Html, table: Html | None = None, note: str | None = None) -> Html:
    """A chart with its caption, a remark, and its figures to open."""
    said = tag("figcaption", tag("strong", caption), note and join(" ", note))
    rest = table and tag("details", tag("summary", "Figures"), table)
    return tag("figure", said, tag("div", drawing, class_="chart"), rest)


def table(
    heads: Sequence[str], rows: Sequence[Sequence[object]], caption: str | None = None,
    numbers: Container[int] = range(1, 99), class_: str | None = None,
) -> Html:  # fmt: skip
    """`numbers`: which columns are. The first cell of a row is its heading."""

    def cell(place: int, value: object) -> Html:
        kind = "n" if place in numbers else None
        if place == 0:
            return tag("th", value, scope="row")
        return tag("td", value, class_=kind)

    top = [
        tag("th", head, scope="col", class_="n" if place in numbers else None)
        for place, head in enumerate(heads)
    ]
    body = [tag("tr", [cell(place, value) for place, value in enumerate(row)]) for row in rows]
    whole = tag(
        "table",
        caption and tag("caption", caption),
        tag("thead", tag("tr", top)),
        tag("tbody", body),
        class_=class_,
    )
    return tag("div", whole, class_="scroll")  # the keyboard scrolls it where it is wide


def bars(
    values: Sequence[Bar],
    unit: str,
    axis: str,
    label: str,
    class_: str = "bar",
    width: int = HALF,
    height: int = 230,
) -> Html:
    """A histogram: how often each of some classes was met."""
    top = nice_top(max((bar.value for bar in values), default=0))
    inner, plot = width - _LEFT - _RIGHT, height - _TOP - _BOTTOM
    step = inner / max(len(values), 1)
    total = sum(bar.value for bar in values) or 1
    every = math.ceil(len(values) / 20)
    drawn = []
    for place, bar in enumerate(values):
        tall = plot * bar.value / top
        x = _LEFT + place * step + step * 0.12
        said = f"{bar.name}: {count(bar.value)} {unit}, {percent(bar.value / total)}"
        drawn.append(
            tag(
                "rect", tag("title", said), x=_n(x), y=_n(_TOP + plot - tall),
                width=_n(step * 0.76), height=_n(max(tall, 1.0 if bar.value else 0.0)),
                rx="1.5", class_=class_,
            )
        )  # fmt: skip
        if place % every == 0:
            drawn.append(_text(bar.name, x + step * 0.38, _TOP + plot + 15, "middle"))
    drawn.append(_text(axis, _LEFT + inner / 2, height - 4, "middle", "axis"))
    return _svg(width, height, label, _grid(width, top, plot, count), drawn)


def line(
    points: Sequence[tuple[float, float | None]], label: str, axis: str, ticks: Sequence[str],
    marks: Sequence[tuple[float, str, str]] = (), width: int = FULL, height: int = 230,
    more: Sequence[Sequence[tuple[float, float | None]]] = (), top: float = 1.0,
    shown: Shown = lambda y: percent(y, 0),
) -> Html:  # fmt: skip
    """Values of 0 to `top`, over x between 0 and 1. `marks`: x, class, words.

    Points without a value are passed over. `more` are fainter lines.
    """
    inner, plot = width - _LEFT - _RIGHT, height - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + x * inner, _TOP + plot * (1 - y / top)

    drawn: list[Html] = []
    for x, class_, words in marks:
        at = _n(_LEFT + x * inner)
        drawn.append(
            tag("line", tag("title", words), x1=at, x2=at, y1=_n(_TOP - 6), y2=_n(_TOP + plot),
                class_=f"mark {class_}")
        )  # fmt: skip
    for number, series in enumerate([*more, points]):
        is_main = number == len(more)
        path = _path([place(x, y) for x, y in series if y is not None])
        class_ = "curve" if is_main else f"curve faint s{number % 4}"
        drawn.append(tag("path", d=path, class_=class_))
    for (x, y), said in zip(points, ticks, strict=True):
        if y is not None:
            cx, cy = place(x, y)
            drawn.append(
                tag("circle", tag("title", f"{said}: {shown(y)}"), cx=_n(cx), cy=_n(cy),
                    r="3" if len(points) <= 60 else "2", class_="dot")
            )  # fmt: skip
    wide = 16 + 7 * max(map(len, ticks), default=0)
    every = max(1, math.ceil(len(points) * wide / inner))
    for number, ((x, _), said) in enumerate(zip(points, ticks, strict=True)):
        if number % every == 0:
            drawn.append(_text(said, _LEFT + x * inner, _TOP + plot + 15, "middle"))
    drawn.append(_text(axis, _LEFT + inner / 2, height - 4, "middle", "axis"))
    return _svg(width, height, label, _grid(width, top, plot, shown), drawn)


def stacked(moments: Sequence[Moment], label: str, width: int = HALF, height: int = 230) -> Html:
    """Seconds in queue and in compute, by when groups were done."""
    top = nice_seconds(max((m.queue_sec + m.compute_sec for m in moments), default=0))
    inner, plot = width - _LEFT - _RIGHT, height - _TOP - _BOTTOM
    step = inner / max(len(moments), 1)
    every = max(1, math.ceil(len(moments) / 5))
    drawn = []
    for place, moment in enumerate(moments):
        x, base = _LEFT + place * step + step * 0.12, _TOP + plot
        for name, value in (("compute", moment.compute_sec), ("queue", moment.queue_sec)):
            tall = plot * value / top
            base -= tall
            said = f"{clock(moment.begin)}: {seconds(value)} in {name}"
            drawn.append(
                tag("rect", tag("title", said), x=_n(x), y=_n(base), width=_n(step * 0.76),
                    height=_n(tall), class_=name)
            )  # fmt: skip
        if place % every == 0:
            drawn.append(_text(clock(moment.begin), x + step * 0.38, _TOP + plot + 15, "middle"))
    drawn.append(_text("done at, UTC", _LEFT + inner / 2, height - 4, "middle", "axis"))
    return _svg(width, height, label, _grid(width, top, plot, seconds), drawn)


def strip(parts: Sequence[tuple[str, str, float, str]], label: str) -> Html:
    """One bar in parts: name, class, value, words. Parts too small to see have no name."""
    total = sum(value for _, _, value, _ in parts) or 1.0
    x, drawn = 0.0, []
    for name, class_, value, words in parts:
        wide = FULL * value / total
        drawn.append(
            tag("rect", tag("title", f"{name}: {words}"), x=_n(x), y="0", height="32",
                width=_n(max(wide - 1, 0)), class_=class_)
        )  # fmt: skip
        if wide > 8 * len(name) + 12:
            drawn.append(_text(name, x + 8, 21, "start", "on"))
        x += wide
    return _svg(FULL, 32, label, drawn)


def interval(saved: Saved) -> Html:
    """What was saved as a dot with its interval, beside nothing."""
    low = saved.usd if saved.low_usd is None else saved.low_usd
    high = saved.usd if saved.high_usd is None else saved.high_usd
    reach = max(abs(low), abs(high), abs(saved.usd), 1e-12) * 1.12
    left, right = min(low, 0.0) and -reach, max(high, 0.0) and reach
    span = (right - left) or 1.0

    def at(value: float) -> float:
        return 30 + (FULL - 60) * (value - left) / span

    y, zero, shown = 30.0, at(0.0), usd(saved.usd, saved.reach)
    word = "good" if saved.usd >= 0 else "bad"
    drawn = [
        tag("line", x1="30", x2=_n(FULL - 30.0), y1=_n(y), y2=_n(y), class_="grid"),
        tag("line", x1=_n(zero), x2=_n(zero), y1="10", y2="50", class_="zero"),
        _text("$0: as without drafts", zero + (6 if zero < FULL / 2 else -6), 64,
              "start" if zero < FULL / 2 else "end"),
        tag("rect", x=_n(at(low)), y=_n(y - 5), width=_n(at(high) - at(low)), height="10", rx="5",
            class_=f"range {word}"),
        tag("circle", tag("title", shown), cx=_n(at(saved.usd)), cy=_n(y), r="7",
            class_=f"point {word}"),
        _text(shown, at(saved.usd), 16, "middle", "strong"),
    ]  # fmt: skip
    return _svg(FULL, 70, f"saved {usd(saved.usd)}, 95 % interval {usd(low)} to {usd(high)}", drawn)


def nice_top(value: float) -> float:
    """The next of 1, 2, 5 × 10ⁿ."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value * 0.9999)


def nice_seconds(value: float) -> float:
    """The next round time: minutes and hours are not decimal."""
    round_ones = (120, 240, 600, 1200, 2400, 3600, 7200, 14_400, 28_800, 57_600, 86_400)
    return nice_top(value) if value <= 60 else next(
        (float(step) for step in round_ones if step >= value), 86_400 * nice_top(value / 86_400)
    )  # fmt: skip


def _grid(width: int, top: float, plot: float, shown: Shown) -> list[Html]:
    drawn = []
    for quarter in range(5):
        y = _TOP + plot * (1 - quarter / 4)
        drawn.append(
            tag("line", x1=_n(_LEFT), x2=_n(width - _RIGHT), y1=_n(y), y2=_n(y), class_="grid")
        )
        if quarter % 2 == 0:
            drawn.append(_text(shown(top * quarter / 4), _LEFT - 8, y + 4, "end"))
    return drawn


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points) if points else ""


def _text(said: str, x: float, y: float, anchor: str, class_: str | None = None) -> Html:
    return tag("text", said, x=_n(x), y=_n(y), text_anchor=anchor, class_=class_)


def _svg(width: int, height: int, label: str, *contents: object) -> Html:
    # HTML's parser knows this attribute in any case, and writes it as SVG has it.
    box = f"0 0 {width} {height}"
    class_ = "wide" if width == FULL else None
    return tag("svg", *contents, viewbox=box, role="img", aria_label=label, class_=class_)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
