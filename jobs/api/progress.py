"""Progress of a job where it is looked at: a bar in a notebook, or what commands show on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from specbatch.jobs.cli.console import err
from specbatch.pipeline.observe.terminal.progress import (
    EngineCounts,
    Meter,
    Reading,
    progress_view,
)
from specbatch.schemas.job_progress import JobProgress

if TYPE_CHECKING:
    from specbatch.jobs.running.here import Show

_BAR = (
    '<div style="font-family: monospace">'
    '<progress value="{done:.0f}" max="{total}" style="width: 24em; vertical-align: middle">'
    "</progress> {line}</div>"
)


def view_of(
    wanted: bool, samples_per_row: int, max_tokens: int | None = None
) -> AbstractContextManager[Show]:
    """What shows each new count.

    `samples_per_row`: completions of a prompt; `max_tokens`: of a completion.
    """
    if not wanted:
        return _nowhere()
    if in_notebook():
        return _notebook_view(samples_per_row, max_tokens)
    return progress_view(err, samples_per_row, max_tokens)


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel. IPython is not imported to find out."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def html_of(reading: Reading) -> str:
    """A bar and a line of figures."""
    return _BAR.format(
        done=reading.done, total=max(reading.total, 1), line=escape(reading.line, quote=False)
    )


@contextmanager
def _nowhere() -> Iterator[Show]:
    yield lambda *_: None


@contextmanager
def _notebook_view(samples_per_row: int, max_tokens: int | None) -> Iterator[Show]:
    from IPython.display import HTML, display

    meter = Meter(samples_per_row, max_tokens=max_tokens)
    handles: list[Any] = []
    shown = ""

    def show(progress: JobProgress, engine: EngineCounts | None) -> None:
        nonlocal shown
        now = html_of(meter.read(progress, engine))
        if now == shown:
            return
        shown = now
        if handles:
            handles[0].update(HTML(now))
        else:
            handles.append(display(HTML(now), display_id=True))

    yield show
