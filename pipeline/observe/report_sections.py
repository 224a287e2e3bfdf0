"""The sections of a report. Each takes all facts, and is None where it has nothing to tell."""

from __future__ import annotations

from collections.abc import Callable

from specbatch.pipeline.observe import report_tokens
from specbatch.pipeline.observe.markup import Html, join, tag
from specbatch.pipeline.observe.report_charts import (
    HALF,
    bars,
    figure,
    interval,
    line,
    stacked,
    strip,
    table,
)
from specbatch.pipeline.observe.report_facts import Facts, Outlier, Saved, Spread
from specbatch.pipeline.observe.units import (
    NOTHING,
    clock,
    count,
    percent,
    plural,
    seconds,
    usd,
    when,
)
from specbatch.pipeline.observe.units import figure as number
from specbatch.schemas.speculation import ALL_PROPOSERS, DecisionAction

DECISIONS_SHOWN = 40
_STOPS = (DecisionAction.OFF, DecisionAction.TAKEN_OUT)


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
        how_sure = "Only one group was measured, so there is no interval."
    else:
        low, high = usd(saved.low_usd), usd(saved.high_usd)
        how_sure = f"95 % interval {low} to {high}, from {plural(saved.groups, 'group')}."
        if not saved.is_certain:
            how_sure += " It has $0 in it: whether drafts paid is not certain."
    caption = "Saved against depth 0" if saved.usd >= 0 else "Lost against depth 0"
    note = (
        f"{how_sure} The measured steps cost {usd(saved.taken_usd)}; without drafts the job's own "
        f"control windows say {usd(saved.taken_usd * saved.speedup)}."
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
    xs = [((m.begin + m.end) / 2 - first) / span for m in moments]
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
            "off" if d.action in _STOPS else "on",
            f"{clock(d.at)} {d.action}{_whom(d.proposer)}",
        )
        for d in facts.decisions
        if first <= d.at <= last and d.action is not DecisionAction.SKIPPED
    ][:DECISIONS_SHOWN]
    drawing = line(
        [(x, m.rate) for x, m in zip(xs, moments, strict=True)],
        "acceptance over the job's time", "done at, UTC",
        [clock((m.begin + m.end) / 2) for m in moments], marks, more=more,
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
        (tag("bdi", d.name), count(d.completions), count(d.tokens), _rated(d.rate), usd(d.usd),
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
        (d.name, count(d.drafts), count(d.proposed), count(d.accepted), _rated(d.rate))
        for d in facts.by_source
    ]
    return tag("div", table(heads, rows, "By proposer"))


def _rated(rate: float | None) -> Html:
    """A share with a bar of that length."""
    if rate is None:
        return tag("span", NOTHING)
    wide = f"{max(0.0, min(rate, 1.0)):.3f}"
    return tag("span", tag("meter", value=wide, aria_hidden="true"), " ", percent(rate))


def depth(facts: Facts) -> Html | None:
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
    return tag("div", drawn, class_="pair") if drawn else None


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


def outliers(facts: Facts) -> Html | None:
    if not facts.slowest:
        return None
    return join(
        _outliers(facts, facts.slowest, "Slowest prompts", "by their share of device time"),
        _outliers(facts, facts.least_accepted, "Least accepted prompts",
                  "of those with at least 16 draft tokens"),
    )  # fmt: skip


def _outliers(facts: Facts, found: tuple[Outlier, ...], title: str, how: str) -> Html | None:
    if not found:
        return None
    heads = ["row", "device time", "tokens", "passes", "acceptance"]
    with_texts = facts.texts is None
    if with_texts:
        heads.insert(1, "prompt and output")
    rows = []
    for o in found:
        name = count(o.row) + (f" / {o.sample}" if o.sample else "")
        figures: list[object] = [seconds(o.sec), count(o.tokens), count(o.passes), _rated(o.rate)]
        if with_texts:
            figures.insert(0, _excerpts(o))
        rows.append([name, *figures])
    return table(
        heads, rows, f"{title}, {how}", numbers=range(2 if with_texts else 1, 9),
        class_="texts" if with_texts else None,
    )  # fmt: skip


def _excerpts(o: Outlier) -> Html:
    ids = [tag("code", tag("bdi", o.row_id), class_="id")] if o.row_id else []
    if o.tag:
        ids.append(tag("span", tag("bdi", o.tag), class_="chip"))
    return join(
        tag("div", ids) if ids else None,
        o.prompt and tag("div", tag("bdi", o.prompt), class_="excerpt prompt"),
        o.output and tag("div", tag("bdi", o.output), class_="excerpt"),
    )


def decisions(facts: Facts) -> Html | None:
    if not facts.decisions:
        return None
    counted = ", ".join(f"{n:,} × {action}" for action, n in facts.decisions_by_action.items())
    shown = facts.decisions
    left = len(shown) - DECISIONS_SHOWN
    if left > 0:
        shown = shown[: DECISIONS_SHOWN // 2] + shown[-DECISIONS_SHOWN // 2 :]
    heads = ["when", "decision", "about", "why", "acceptance", "needed"]
    rows = [
        (clock(d.at), tag("span", d.action.value, class_=f"chip {_tone(d.action)}"),
         tag("span", _whom(d.proposer).strip() or "all drafts", class_="whom"), d.reason,
         percent(d.acceptance), percent(d.break_even))
        for d in shown
    ]  # fmt: skip
    if all(d.acceptance is None and d.break_even is None for d in shown):
        heads, rows = heads[:4], [row[:4] for row in rows]  # the reasons have the figures
    said = f"{counted}." + (
        f" The first and last {DECISIONS_SHOWN // 2} are shown." if left > 0 else ""
    )
    return join(
        tag("p", said, class_="meta"),
        table(heads, rows, "Decisions about drafts, oldest first", numbers=(4, 5), class_="words"),
    )


def _tone(action: DecisionAction) -> str:
    return "warn" if action in _STOPS else "plain"


def _whom(proposer: str) -> str:
    return "" if proposer == ALL_PROPOSERS else f" {proposer}"


def quarantine(facts: Facts) -> Html | None:
    drawn = []
    if facts.quarantined:
        rows = [
            (tag("code", q.code), count(q.rows), tag("ul", [_example(e) for e in q.examples]))
            for q in facts.quarantined
        ]
        drawn.append(
            table(("reason", "rows", "the first of them"), rows, "Quarantined rows by reason",
                  numbers=(1,), class_="words")
        )  # fmt: skip
    if facts.failed_groups:
        left = facts.failed_groups_total - len(facts.failed_groups)
        drawn.append(
            table(("what", "why"), facts.failed_groups, "Groups and rows without a result",
                  class_="words", numbers=())
        )  # fmt: skip
        if left > 0:
            drawn.append(tag("p", f"… and {count(left)} more.", class_="meta"))
    return join(drawn) if drawn else None


def _example(example: tuple[str, str]) -> Html:
    where, why = example
    return tag("li", tag("bdi", where), f": {why}" if why else None)


def audits(facts: Facts) -> Html | None:
    if not facts.audits:
        return None
    log = {
        True: tag("span", "intact", class_="chip good"),
        False: tag("span", "NOT intact", class_="chip bad"),
    }
    rows = [
        (when(a.at, seconds_too=False), a.actor, count(a.sampled), count(a.tokens),
         count(a.differing), count(len(a.findings)), log[a.intact])
        for a in facts.audits[-20:]
    ]  # fmt: skip
    looked, differing = (sum(getattr(a, n) for a in facts.audits) for n in ("sampled", "differing"))
    said = (
        f"{plural(looked, 'completion')} decided again from nothing; {count(differing)} differed."
    )
    findings = [f.what for a in facts.audits for f in a.findings][:20] if facts.words else []
    return join(
        tag("p", said) if looked else None,
        table(("when", "by", "completions", "tokens", "differing", "findings", "log"), rows,
              "Audits", numbers=range(2, 6)),
        tag("ul", [tag("li", finding) for finding in findings]) if findings else None,
    )  # fmt: skip


def samples(facts: Facts) -> Html | None:
    if not facts.samples:
        return tag("p", facts.texts, class_="notice") if facts.texts else None
    said = []
    if facts.texts:
        said.append(f"{facts.texts} What each token was is shown without it.")
    elif facts.tokens_as_ids:
        said.append("The verifier's tokenizer is not on this machine, so tokens are shown by id.")
    if any(token.text is None for output in facts.samples for token in output.tokens):
        said.append("▮ stands for a token that is not kept.")
    return join(
        tag("p", " ".join(said), class_="notice") if said else None,
        report_tokens.outputs(facts),
    )


def versions(facts: Facts) -> Html | None:
    rows = [(name, tag("code", value)) for name, value in facts.versions]
    rows += [("devices", tag("code", device)) for device in facts.devices]
    rows.append(("report made by", f"specbatch {facts.version}"))
    return table(("what", "value"), rows, "What decided the output", numbers=(), class_="words")


Section = tuple[str, str, str, Callable[[Facts], Html | None]]
SECTIONS: tuple[Section, ...] = (
    ("money", "Money", "What the job cost, and what drafts saved.", money),
    ("acceptance", "Acceptance", "How many draft tokens the verifier agreed with.", acceptance),
    ("depth", "Depth", "How far drafts were followed, and where they broke off.", depth),
    ("batches", "Batches and waiting", "How full passes were, and what groups waited.", batches),
    ("outliers", "Prompts that stand out", "Where to look first.", outliers),
    ("decisions", "Decisions", "What was decided about drafts, and on which figures.", decisions),
    ("quarantine", "Rows without a result", "Set aside by ingest, or failed.", quarantine),
    ("audits", "Audits", "Completions that were decided again.", audits),
    ("samples", "Sampled outputs", "Where each token came from.", samples),
    ("versions", "Versions", "Models, settings and fingerprints.", versions),
)
