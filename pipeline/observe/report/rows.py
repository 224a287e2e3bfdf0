"""Sections of single rows, decisions and versions. None where there is nothing to tell."""

from __future__ import annotations

from specbatch.pipeline.observe.report import tokens as report_tokens
from specbatch.pipeline.observe.report.charts import table
from specbatch.pipeline.observe.report.facts import Facts, Outlier
from specbatch.pipeline.observe.report.figures import STOPS, rated, whom
from specbatch.pipeline.observe.report.markup import Html, join, tag
from specbatch.pipeline.observe.units import (
    clock,
    count,
    percent,
    plural,
    seconds,
    when,
)
from specbatch.schemas.speculation import DecisionAction

DECISIONS_SHOWN = 40


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
        figures: list[object] = [seconds(o.sec), count(o.tokens), count(o.passes), rated(o.rate)]
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
    rows: list[tuple[object, ...]] = [
        (clock(d.at), tag("span", d.action.value, class_=f"chip {_tone(d.action)}"),
         tag("span", whom(d.proposer).strip() or "all drafts", class_="whom"), d.reason,
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
    return "warn" if action in STOPS else "plain"


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
    rows: list[tuple[str, object]] = [(name, tag("code", value)) for name, value in facts.versions]
    rows += [("devices", tag("code", device)) for device in facts.devices]
    rows.append(("report made by", f"specbatch {facts.version}"))
    return table(("what", "value"), rows, "What decided the output", numbers=(), class_="words")
