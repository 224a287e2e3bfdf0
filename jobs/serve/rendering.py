"""The page's templates, its style, script and picture, and the policy of all that it answers.

Every text is escaped. No template has a script or a style of its own: the policy forbids both.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from fastapi.responses import HTMLResponse, Response

from specbatch.pipeline.observe import units
from specbatch.pipeline.observe.report.page import cleaned

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_TYPES = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_KEPT = "public, max-age=31536000, immutable"  # its address changes with its content
_FILTERS = (
    *(units.count, units.figure, units.percent, units.plural, units.seconds, units.usd),
    units.when,
)


@dataclass(frozen=True, slots=True)
class Static:
    """A file that pages load."""

    body: bytes
    kind: str

    @property
    def version(self) -> str:
        return hashlib.sha256(self.body).hexdigest()[:12]


@cache
def statics() -> dict[str, Static]:
    """By name. No other name is ever read."""
    return {name: Static(_read("static", name).encode(), kind) for name, kind in _TYPES.items()}


def static_answer(name: str) -> Response:
    """One of `statics`."""
    found = statics()[name]
    return Response(found.body, media_type=found.kind, headers={"Cache-Control": _KEPT})


def html(template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """A page of a template."""
    return HTMLResponse(cleaned(_templates().get_template(template).render(**values)), status)


@cache
def _templates() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: _read("templates", name)),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters |= {function.__name__: function for function in _FILTERS}
    made.globals |= {"static": _address, "version": units.version_here()}
    return made


def _address(name: str) -> str:
    return f"/static/{name}?v={statics()[name].version}"


def _read(folder: str, name: str) -> str:
    place = files("specbatch.jobs.serve").joinpath(folder, name)
    return place.read_text(encoding="utf-8")
