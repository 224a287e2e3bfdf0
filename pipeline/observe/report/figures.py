"""Sections of figures: money, acceptance, depth, batches. None where there is nothing to tell."""

from __future__ import annotations

from specbatch.pipeline.observe.report.charts import (
    HALF,
    bars,
    figure,
    interval,
    line,
    nice_top,
    stacked,
    strip,
    table,
)
from specbatch.pipeline.observe.report.facts import Facts, Saved, Spread
from specbatch.pipeline.observe.report.markup import Html, join, tag
from specbatch.pipeline.observe.units import (
    NOTHING,
    clock,
    count,
    percent,
    plural,
    seconds,
    usd,
)
from specbatch.pipeline.observe.units import figure as number
from specbatch.schemas.speculation import ALL_PROPOSERS, DecisionAction

DECISIONS_MARKED = 40
STOPS = (DecisionAction.OFF, DecisionAction.TAKEN_OUT)


def money(facts: Facts) -> Html | None:
    if not facts.parts and facts.saved is None:
        return None
    parts = [(p.kind, f"k-{p.kind}", p.usd, usd(p.usd)) for p in facts.parts]
    total = sum(p.usd for p in facts.parts)
    if not total:  # a device that costs nothing: by time
        parts = [(p.kind, f"k-{p.kind}", p.sec, seconds(p.sec)) for p in facts.parts]
    rows = [
        (p.kind, p.meaning, seconds(p.sec), usd(p.usd), percent(p.usd / total if total else None))
        for p in facts.parts
    ]
    rows.append(("sum", "", seconds(sum(p.sec for p in facts.parts)), usd(facts.usd), ""))
    heads = ("kind", "what it went into", "device time", "cost", "share")
    return join(
        _saved(facts.saved) if facts.saved else None,
        figure("Where the money went", strip(parts, "cost by kind of device time"))
        if parts
        else None,
        table(heads, rows, "Cost by kind of device time", numbers=range(2, 9), class_="sum")
        if facts.parts
        else None,
    )


def _saved(saved: Saved) -> Html:
    if saved.low_usd is None or saved.high_usd is None:
        how_sure = "There was only one control step, so there is no interval."
    else:
        low, high = usd(saved.low_usd, saved.reach), usd(saved.high_usd, saved.reach)
        how_sure = f"95 % interval {low} to {high}, from {plural(saved.controls, 'control step')}."
        if not saved.is_certain:
            how_sure += " It has $0 in it: whether drafts paid is not certain."
    caption = "Saved against depth 0" if saved.usd >= 0 else "Lost against depth 0"
    note = (
        f"{how_sure} The measured steps cost {usd(saved.taken_usd)}; at depth 0 they would have "
        f"cost {usd(saved.taken_usd * saved.speedup)}, say the job's own control steps."
    )
    return figure(caption, interval(saved), note=note)


def acceptance(facts: Facts) -> Html | None:
    if not facts.progress.proposed:
        return None
    return join(
        _over_time(facts),
        tag("div", _by_tag(facts), _by_source(facts), class_="pair left"),
    )


def _over_time(facts: Facts) -> Html | None:
    moments = facts.over_time
    if not moments:
        return None
    first, last = moments[0].begin, moments[-1].end
    span = (last - first) or 1.0
    xs = [(m.middle - first) / span for m in moments]
    names = [s.name for s in facts.by_source[:4]]
    more = []
    if len(names) > 1:
        for name in names:
            counted = [m.by_source.get(name, (0, 0)) for m in moments]
            rates = [accepted / proposed if proposed else None for proposed, accepted in counted]
            more.append(list(zip(xs, rates, strict=True)))
    marks = [
        (
            (d.at - first) / span,
            "off" if d.action in STOPS else "on",
            f"{clock(d.at)} {d.action}{whom(d.proposer)}",
        )
        for d in facts.decisions
        if first <= d.at <= last and d.action is not DecisionAction.SKIPPED
    ][:DECISIONS_MARKED]
    drawing = line(
        [(x, m.rate) for x, m in zip(xs, moments, strict=True)],
        "acceptance over the job's time", "done at, UTC",
        [clock(m.middle) for m in moments], marks, more=more,
    )  # fmt: skip
    heads = ("from", "groups", "tokens", "draft tokens", "accepted", "acceptance")
    rows = [
        (clock(m.begin), count(m.groups), count(m.tokens), count(m.proposed), count(m.accepted),
         percent(m.rate))
        for m in moments
    ]  # fmt: skip
    note = "Accepted ÷ verified draft tokens, by when groups were done."
    if more:
        key = [tag("li", tag("i", class_="main"), "all drafts")]
        key += [tag("li", tag("i", class_=f"s{i}"), name) for i, name in enumerate(names)]
        drawing = join(tag("ul", key, class_="key"), drawing)
    if marks:
        note += " Upright lines: decisions about drafts."
    shown = table(heads, rows, "Acceptance over time")
    return figure("Acceptance over time", drawing, shown, note)


def _by_tag(facts: Facts) -> Html | None:
    if not facts.by_tag:
        return None
    heads = ("tag", "completions", "tokens", "acceptance", "cost", "per 1k tokens")
    rows = [
        (tag("bdi", d.name), count(d.completions), count(d.tokens), rated(d.rate), usd(d.usd),
         usd(1000 * d.usd / d.tokens if d.tokens else None))
        for d in facts.by_tag
    ]  # fmt: skip
    left = facts.tags_left_out
    more = (
        tag("p", f"{plural(left, 'more tag')} with fewer tokens.", class_="meta") if left else None
    )
    return tag("div", table(heads, rows, "By tag of the rows"), more)


def _by_source(facts: Facts) -> Html | None:
    if not facts.by_source:
        return None
    heads = ("source of drafts", "drafts", "draft tokens", "accepted", "acceptance")
    rows = [
        (d.name, count(d.drafts), count(d.proposed), count(d.accepted), rated(d.rate))
        for d in facts.by_source
    ]
    return tag("div", table(heads, rows, "By proposer"))


def depth(facts: Facts) -> Html | None:
    drawn = _depths(facts)
    if (over_time := _depth_over_time(facts)) is not None:
        return join(tag("div", drawn, class_="pair"), over_time)
    return tag("div", drawn, class_="pair") if drawn else None


def _depth_over_time(facts: Facts) -> Html | None:
    """Where there is more than one stretch of time, and drafts were made."""
    moments = facts.over_time
    deepest = max((m.depth or 0.0 for m in moments), default=0.0)
    if len(moments) < 2 or not deepest:
        return None
    first, span = moments[0].begin, (moments[-1].end - moments[0].begin) or 1.0
    drawing = line(
        [((m.middle - first) / span, m.depth) for m in moments], "depth over the job's time",
        "done at, UTC", [clock(m.middle) for m in moments], height=170,
        top=nice_top(deepest), shown=lambda y: number(y, 1),
    )  # fmt: skip
    rows = [(clock(m.begin), count(m.passes), number(m.depth)) for m in moments]
    heads = ("from", "passes of sequences", "draft tokens in each")
    note = "Draft tokens that a sequence brought to a pass on average, by when groups were done."
    return figure("Depth over time", drawing, table(heads, rows, "Depth over time"), note)


def _depths(facts: Facts) -> list[Html]:
    drawn = []
    if len(facts.depths) > 1:
        drawn.append(
            figure(
                "Depth of speculation",
                bars(facts.depths, "passes", "draft tokens of a sequence in a pass",
                     "passes by draft tokens"),
                table(("draft tokens", "passes"), [(b.name, count(b.value)) for b in facts.depths],
                      "Passes by draft tokens"),
                "How many draft tokens a sequence brought to a pass of the verifier; 0: none.",
            )
        )  # fmt: skip
    if len(facts.positions) > 1:
        last = len(facts.positions) - 1
        rows = [(d.name, count(d.proposed), count(d.accepted), percent(d.rate))
                for d in facts.positions]  # fmt: skip
        drawn.append(
            figure(
                "Acceptance by place in the draft",
                line([(i / last, d.rate) for i, d in enumerate(facts.positions)],
                     "acceptance by place in the draft", "place in the draft",
                     [d.name for d in facts.positions], width=HALF),
                table(("place", "looked at", "accepted", "acceptance"), rows,
                      "Acceptance by place in the draft"),
                "Of the tokens that were reached: all before them had been accepted.",
            )
        )  # fmt: skip
    return drawn


def batches(facts: Facts) -> Html | None:
    drawn = []
    if facts.fill:
        sampled = (
            f" One pass in {facts.fill_sampled} was looked at." if facts.fill_sampled > 1 else ""
        )
        note = (
            f"On average {number(facts.mean_fill, 1)} sequences of this job shared a pass; other "
            f"jobs' in the same pass are not counted.{sampled}"
        )
        drawn.append(
            figure(
                "Batch fill",
                bars(facts.fill, "passes", "sequences of this job in a pass",
                     "passes by sequences in them", "bar two"),
                table(("sequences", "passes"), [(b.name, count(b.value)) for b in facts.fill],
                      "Passes by sequences in them"),
                note,
            )
        )  # fmt: skip
    if facts.queue and facts.compute:
        rows = [_spread_row("queue", facts.queue), _spread_row("compute", facts.compute)]
        heads = ("of a group", "middle", "90 %", "99 %", "longest", "all groups")
        note = (
            "Waiting for a worker beside work on the device, of groups by when they were done."
            " Hours of waiting groups add up: they wait side by side."
        )
        key = tag(
            "ul",
            tag("li", tag("i", class_="queue"), "queue"),
            tag("li", tag("i", class_="compute"), "compute"),
            class_="key",
        )
        drawing = join(key, stacked(facts.over_time, "seconds in queue and in compute"))
        shown = table(heads, rows, "Seconds of groups")
        drawn.append(tag("div", figure("Queue against compute", drawing, note=note), shown))
    return tag("div", drawn, class_="pair") if drawn else None


def _spread_row(name: str, of: Spread) -> tuple[str, ...]:
    return (name, *map(seconds, (of.middle, of.p90, of.p99, of.most, of.total)))


def rated(rate: float | None) -> Html:
    """A share with a bar of that length."""
    if rate is None:
        return tag("span", NOTHING)
    wide = f"{max(0.0, min(rate, 1.0)):.3f}"
    return tag("span", tag("meter", value=wide, aria_hidden="true"), " ", percent(rate))


def whom(proposer: str) -> str:
    return "" if proposer == ALL_PROPOSERS else f" {proposer}"
