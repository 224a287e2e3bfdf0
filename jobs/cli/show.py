"""`specbatch show JOB`: how one job stands."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from specbatch.jobs.cli.connect import client, load_settings
from specbatch.jobs.cli.console import out, say, say_json
from specbatch.jobs.cli.options import JobId
from specbatch.jobs.cli.outcome import as_json
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.observe.summary import summarize, summary_table
from specbatch.schemas.records import RejectedRow

EXAMPLES = 3


def show(
    job: JobId,
    json: Annotated[bool, typer.Option("--json", help="one JSON object on one line")] = False,
) -> None:
    """Show a job's state, progress, costs, errors and quarantined rows."""
    settings = load_settings()
    with client(settings) as c:
        row, progress = c.job(job), c.progress(job)
    if json:
        say_json(as_json(row, progress))
        return
    out.print(summary_table(summarize(row, progress)))
    say(f"progress: {progress.rows_done:,} of {progress.rows_total:,} prompts, "
        f"{progress.groups_done:,} of {progress.groups_total:,} groups"
        + ("" if progress.ingest_done else ", the input is still being read"))  # fmt: skip
    if row.cancel_requested:
        say("a cancel was asked for")
    if row.error:
        say(f"error: {row.error}")
    store = make_store(settings)
    try:
        for line in quarantine_lines(store.rejected(row.job_id)):
            say(line)
        for index, word, _, error in store.failed_groups(row.job_id):
            say(f"group {index} {word}: {error or 'no reason given'}")
    finally:
        store.close()
    say(f"output: {row.output_uri}")


def quarantine_lines(rows: Iterable[RejectedRow]) -> list[str]:
    """Quarantined rows by reason, with the first few of each. Keeps no more than it prints."""
    counts: dict[str, int] = {}
    examples: dict[str, list[str]] = {}
    for row in rows:
        counts[row.code] = counts.get(row.code, 0) + 1
        shown = examples.setdefault(row.code, [])
        if len(shown) < EXAMPLES:
            named = "" if row.row_id is None else f" (id {row.row_id})"
            shown.append(f"    row {row.row_index}{named}: {row.reason}")
    lines = []
    for code, count in sorted(counts.items(), key=lambda item: -item[1]):
        lines += [f"quarantined, {code}: {count:,}", *examples[code]]
    return lines
