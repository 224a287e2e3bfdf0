"""A job's report as one HTML file that needs nothing else: style, script and charts are inside.

Nothing in it is fetched, and nothing may be: its content security policy allows its own style and
script alone, so that no text of a job can do anything either. jinja2 writes it and escapes every
text; it is imported only when a report is made.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from specbatch.pipeline.observe import units
from specbatch.pipeline.observe.report import charts
from specbatch.pipeline.observe.report.facts import Facts
from specbatch.schemas.errors import MissingExtraError
from specbatch.schemas.records import Origin

# Name, heading and lead of each section, in their order; a macro in `sections.html` writes it.
SECTIONS = (
    ("money", "Money", "What the job cost, and what drafts saved."),
    ("acceptance", "Acceptance", "How many draft tokens the verifier agreed with."),
    ("depth", "Depth", "How deep drafts went, and where they were rejected."),
    ("batches", "Batches and waiting", "How full passes were, and how long groups waited."),
    ("outliers", "Prompts that stand out", "Where to look first."),
    ("decisions", "Decisions", "What was decided about drafts, and why."),
    ("quarantine", "Rows without a result", "Quarantined by ingest, or failed."),
    ("audits", "Audits", "Completions that were generated again to check them."),
    ("samples", "Sampled outputs", "Where each token came from."),
    ("versions", "Versions", "Models, settings and fingerprints."),
)
# One letter each, as there are thousands of tokens.
TOKEN_CLASSES = {Origin.ACCEPTED: "a", Origin.CORRECTED: "c", Origin.BONUS: "b", Origin.PLAIN: "p"}
_GONE = "▮"  # a token that is not kept, or has no text of its own
_BREAK = "⏎"
# Control characters that HTML has no place for, halves of characters that UTF-8 has none for, and
# what shows words in another order than they have.
_NOT_TEXT = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe\uffff\ud800-\udfff"
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    heading: str
    lead: str
    body: str  # markup


def page(facts: Facts) -> str:
    """The whole file. Raises `MissingExtraError` without jinja2."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError:
        raise MissingExtraError(
            "`specbatch report` needs jinja2, which is not installed here: "
            "`pip install 'specbatch[report]'`"
        ) from None
    templates = _templates(jinja2)
    macros = templates.get_template("sections.html").module
    sections = [
        Section(name, heading, lead, body)
        for name, heading, lead in SECTIONS
        if (body := getattr(macros, name)(facts).strip())
    ]
    whole = templates.get_template("page.html").render(
        facts=facts,
        sections=sections,
        style=Markup(_read("report.css")),
        script=Markup(_read("report.js")),
        policy=policy(),
    )
    return cleaned(whole)


def cleaned(markup: str) -> str:
    """Markup without what is no text, or would show words in another order."""
    return _NOT_TEXT.sub("\ufffd", markup).strip() + "\n"


@cache
def _templates(jinja2: Any) -> Any:
    """jinja2's environment. Compiling its templates takes longer than writing a page."""
    templates = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    templates.globals["charts"] = charts
    templates.filters |= {function.__name__: function for function in FILTERS}
    return templates


def token_class(origin: Origin) -> str:
    return TOKEN_CLASSES[origin]


def token_text(text: str | None) -> str:
    """Something to point at, whatever the token is."""
    if not text:
        return _GONE
    return text[:-1] + _BREAK + "\n" if text.endswith("\n") else text


def labelled(rows: str, heads: Sequence[str]) -> str:
    """Table rows whose cells carry their column's name, for screens too narrow for columns.

    `rows` is markup; so is the result.
    """
    from markupsafe import Markup, escape

    def with_labels(row: re.Match[str]) -> str:
        labels = iter(heads[1:])  # a row's first cell is its heading
        return re.sub("<td", lambda _: f'<td data-label="{escape(next(labels))}"', row[0])

    return Markup(re.sub(r"<tr>.*?</tr>", with_labels, rows, flags=re.DOTALL))


FILTERS = (
    *(units.clock, units.count, units.figure, units.percent, units.plural, units.seconds),
    *(units.usd, units.when, labelled, token_class, token_text),
)


def policy() -> str:
    """What a report may load and do: nothing but its own script and style."""
    digest = base64.b64encode(hashlib.sha256(_read("report.js").encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _read(name: str) -> str:
    folder = files("specbatch.pipeline.observe.report")
    return folder.joinpath("templates", name).read_text(encoding="utf-8")
