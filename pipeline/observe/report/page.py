"""A job's report as one HTML file that needs nothing else: style, script and charts are inside.

Nothing in it is fetched, and nothing may be: its content security policy allows its own style and
script alone, so that no text of a job can do anything either.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

from specbatch.pipeline.observe.report.facts import Facts
from specbatch.pipeline.observe.report.markup import Html, join, tag
from specbatch.pipeline.observe.report.sections import SECTIONS
from specbatch.pipeline.observe.units import (
    NOTHING,
    count,
    figure,
    percent,
    plural,
    seconds,
    usd,
    when,
)
from specbatch.schemas.records import JobState

_TONES = {
    JobState.DONE: "good",
    JobState.PARTIAL: "warn",
    JobState.FAILED: "bad",
    JobState.CANCELLED: "bad",
}


def page(facts: Facts) -> str:
    """The whole file."""
    title = f"{facts.job.name}: specbatch job {facts.job.job_id}"
    shown = [
        (name, heading, what, content)
        for name, heading, what, draw in SECTIONS
        if (content := draw(facts)) is not None
    ]
    style, script = _asset("report.css"), _asset("report.js")
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=f"specbatch {facts.version}"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        tag("style", style),
    )
    body = join(
        tag("a", "Skip to the figures", href="#money", class_="skip"),
        _header(facts),
        tag("nav", tag("ul", [tag("li", tag("a", heading, href=f"#{name}"))
                              for name, heading, _, _ in shown]), aria_label="Sections"),
        tag("main", _cards(facts), [
            tag("section", tag("h2", heading, id=f"{name}-heading"), tag("p", what, class_="lead"),
                content, id=name, aria_labelledby=f"{name}-heading")
            for name, heading, what, content in shown
        ]),
        tag("footer", f"Made {when(facts.made_at)} by specbatch {facts.version} from its store. "
            "This file stands by itself: nothing is loaded from anywhere."),
        tag("script", script),
    )  # fmt: skip
    whole = tag("html", tag("head", head), tag("body", body), lang="en")
    return f"<!DOCTYPE html>\n{whole}\n"


def _header(facts: Facts) -> Html:
    job, progress = facts.job, facts.progress
    state = tag("span", str(progress.state), class_=f"chip {_TONES.get(progress.state, 'plain')}")
    times = [("submitted", job.created_at), ("started", job.started_at), ("ended", job.finished_at)]
    told = [f"{name} {when(at)}" for name, at in times if at is not None]
    notes = [*_notes(facts)]
    return tag(
        "header",
        tag("p", "specbatch · job report", class_="brand"),
        tag("h1", tag("bdi", job.name), " ", state),
        tag("p", tag("code", job.job_id), f" · tenant {job.tenant} · ", " · ".join(told),
            class_="meta"),
        tag("p", summary(facts), class_="summary"),
        [tag("p", note, class_="notice") for note in notes],
    )  # fmt: skip


def _notes(facts: Facts) -> list[str]:
    job, progress = facts.job, facts.progress
    notes = []
    if not progress.state.is_final:
        notes.append(
            f"The job is still {progress.state}: {count(progress.rows_done)} of "
            f"{count(progress.rows_total)} prompts are done"
            + ("" if progress.ingest_done else ", and its input is still being read")
            + ". These are the figures so far."
        )
    if job.cancel_requested:
        word = "was stopped" if progress.state.is_final else "is being stopped"
        why = job.stop_reason if facts.words else None
        notes.append(f"The job {word}" + (f": {why}." if why else "."))
    if job.error and facts.words:
        notes.append(f"Error: {job.error}")
    if facts.texts:
        notes.append(facts.texts)
    return notes


def summary(facts: Facts) -> str:
    """The job in two sentences."""
    p = facts.progress
    if not p.completions:
        return "No completion was recorded" + (" yet." if not p.state.is_final else ".")
    wall = _wall_sec(facts)
    took = f" in {seconds(wall)}" if wall else ""
    said = (
        f"{plural(p.completions, 'completion')} with {plural(p.completion_tokens, 'token')}{took} "
        f"for {usd(facts.usd)}. "
    )
    if not facts.drafted:
        return said + "Nothing was drafted, so there is nothing that speculation saved or lost."
    if p.proposed:
        said += f"The verifier agreed with {percent(p.acceptance_rate)} of the draft tokens. "
    else:
        said += "No draft token was verified. "
    saved = facts.saved
    if saved is None:
        return said + "What drafts saved was not measured: no control step stands beside them."
    word = "saved" if saved.usd >= 0 else "lost"
    said += f"Speculation {word} {usd(abs(saved.usd), saved.reach)} against depth 0"
    if saved.low_usd is None or saved.high_usd is None:
        return said + f" ({figure(saved.speedup)}×), without an interval."
    said += f" ({figure(saved.speedup)}×; 95 % interval {usd(saved.low_usd, saved.reach)} to "
    said += f"{usd(saved.high_usd, saved.reach)})."
    return said if saved.is_certain else said + " The interval has $0 in it."


def _cards(facts: Facts) -> Html:
    p, saved = facts.progress, facts.saved
    wall = _wall_sec(facts)
    speed = p.completion_tokens / wall if wall else None
    per_pass = p.completion_tokens / p.verifier_passes if p.verifier_passes else None
    cards = [
        ("Cost", usd(facts.usd), f"{usd(facts.usd_per_1k)} per 1,000 tokens", ""),
        _saved_card(facts),
        (
            "Speed-up over depth 0",
            f"{figure(saved.speedup)}×" if saved else NOTHING,
            "in money, over measured steps" if saved else _no_saving(facts),
            "",
        ),
        (
            "Acceptance",
            percent(p.acceptance_rate),
            f"{count(p.accepted)} of {count(p.proposed)} draft tokens"
            if p.proposed
            else "nothing was drafted",
            "",
        ),
        ("Tokens per verifier pass", figure(per_pass), f"{count(p.verifier_passes)} passes", ""),
        (
            "Tokens",
            count(p.completion_tokens),
            f"{count(speed)} per second, {count(p.prompt_tokens)} in prompts"
            if speed
            else f"{count(p.prompt_tokens)} in prompts",
            "",
        ),
        (
            "Prompts",
            count(p.rows_total),
            f"{count(p.rows_failed)} without a result" if p.rows_failed else "all with a result"
            if p.state is JobState.DONE else f"{count(p.rows_done)} done",
            "warn" if p.rows_failed else "",
        ),
        (
            "Time",
            seconds(wall),
            "not begun" if not wall else "from start to end" if p.state.is_final else "so far",
            "",
        ),
    ]  # fmt: skip
    return tag(
        "dl",
        [
            tag("div", tag("dt", name), tag("dd", value, class_="value"), tag("dd", aside),
                class_=f"card {tone}".strip())
            for name, value, aside, tone in cards
        ],
        class_="cards",
    )  # fmt: skip


def _saved_card(facts: Facts) -> tuple[str, str, str, str]:
    saved = facts.saved
    if saved is None:
        aside = _no_saving(facts)
        return "Saved by speculation", NOTHING, aside, ""
    name = "Saved by speculation" if saved.usd >= 0 else "Lost by speculation"
    amount = usd(abs(saved.usd), saved.reach)
    if saved.low_usd is None or saved.high_usd is None:
        return name, amount, "without an interval", ""
    aside = f"95 %: {usd(saved.low_usd, saved.reach)} to {usd(saved.high_usd, saved.reach)}"
    tone = ("good" if saved.usd > 0 else "bad") if saved.is_certain else ""
    return name, amount, aside, tone


def _no_saving(facts: Facts) -> str:
    return "not measured" if facts.drafted else "nothing was drafted"


def _wall_sec(facts: Facts) -> float | None:
    begin, end = facts.job.started_at, facts.job.finished_at
    if begin is None:
        return None
    return max(0.0, (facts.made_at if end is None else end) - begin) or None


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


@cache
def _asset(name: str) -> Html:
    return Html(
        files("specbatch.pipeline.observe.report").joinpath(name).read_text(encoding="utf-8")
    )
