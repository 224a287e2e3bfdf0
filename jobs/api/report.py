"""A job's report, to look at in a notebook or to save as a file."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from specbatch.jobs.cli.report import write_page

_FRAME = (
    '<iframe srcdoc="{page}" style="width: 100%; height: 40em; border: 1px solid #ccc" '
    'title="report of job {job}"></iframe>'
)


@dataclass(frozen=True, slots=True)
class Report:
    """One HTML page that loads nothing from elsewhere, as `specbatch report` writes it."""

    job_id: str
    html: str = field(repr=False)

    def save(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the page and return its path; `report-JOB.html` if none is given.

        Raises `OutputError`.
        """
        place = Path(path) if path is not None else Path(f"report-{self.job_id}.html")
        write_page(place, self.html)
        return place

    def _repr_html_(self) -> str:
        """In a frame of its own, so that its styles leave the notebook alone."""
        return _FRAME.format(page=escape(self.html), job=escape(self.job_id))
