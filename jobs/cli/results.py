"""`specbatch results JOB`: the first completions of a job, to read or to pipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import Annotated, Any

import typer
from rich.table import Table

from specbatch.jobs.cli.console import out, remark, say, show_whole, while_read, write
from specbatch.jobs.cli.options import MOST_SHOWN, JobId
from specbatch.jobs.cli.stores import found_settings
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.operations.tools import make_results
from specbatch.schemas.visible import one_line, visible_json

SHOWN = ("id", "finish_reason", "text")


def results(
    job: JobId,
    head: Annotated[
        int, typer.Option("--head", help="rows to print at most", min=1, max=MOST_SHOWN)
    ] = 10,
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            help="a column to print, also a kept one of the input; repeat for more",
            show_default=False,
        ),
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="only rows that failed or were refused")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="one JSON object per row, with all columns")
    ] = False,
) -> None:
    """Print the first completions of a job, from its output or from the store.

    On a terminal, text is cut to the width. The output of an ended job is complete; of a running
    job, the store has what the job's privacy allows.
    """
    settings = found_settings()
    with closing(make_store(settings)) as store:
        found = make_results(settings, store, store.get_job(job))
        for line in filter(None, (*found.remarks, found.lacks)):
            remark(line)
        asked = tuple(column or ())
        needed = dict.fromkeys([*(asked or SHOWN), *("sample_index", "finish_reason", "error")])
        rows = found.rows(None if json and not asked else tuple(needed))
        some = islice((row for row in rows if not failed or row["error"] is not None), head)
        with while_read():
            if json:
                _print_json(some, asked)
            else:
                _print_table(list(some), asked)


def _print_json(rows: Iterator[Mapping[str, Any]], asked: Sequence[str]) -> None:
    from specbatch.pipeline.outputs.parts import as_text

    for row in rows:
        chosen = {name: row[name] for name in asked} if asked else row
        write(visible_json(chosen, default=as_text) + "\n")


def _print_table(rows: Sequence[Mapping[str, Any]], asked: Sequence[str]) -> None:
    if not rows:
        say("no rows")
        return
    names = list(asked or SHOWN)
    if not asked and any(row["sample_index"] for row in rows):
        names.insert(1, "sample_index")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in names:
        is_last = name == names[-1]
        table.add_column(name, no_wrap=True, overflow="ellipsis" if is_last else "fold")
    for row in rows:
        table.add_row(*(_cell(row, name, asked) for name in names))
    if out.is_terminal:
        out.print(table)
    else:
        show_whole(table)


def _cell(row: Mapping[str, Any], name: str, asked: Sequence[str]) -> str:
    """A value on one line. Where no column was asked for, an error stands in place of a text."""
    value = row[name]
    if name == "text" and not asked and row["error"] is not None:
        value = row["error"]
    if value is None:
        return "-"
    if isinstance(value, list | tuple | dict):
        from specbatch.pipeline.outputs.parts import as_text

        return visible_json(value, default=as_text)
    return one_line(str(value))
