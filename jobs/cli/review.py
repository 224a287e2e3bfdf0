"""`specbatch review JOB`: lists, releases or blocks the completions that content policies hold
back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Annotated

import typer

from specbatch.jobs.cli import options as o
from specbatch.jobs.cli.connect import client, load_settings
from specbatch.jobs.cli.console import say, say_json, while_read
from specbatch.jobs.cli.outcome import finish
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.operations.tools import (
    UNREAD,
    called,
    check_readable,
    held_completions,
)
from specbatch.schemas.errors import UsageError
from specbatch.schemas.policies import Decided, Place, Reviews
from specbatch.schemas.records import CompletionRecord, JobRow
from specbatch.schemas.spec import spec_of
from specbatch.schemas.visible import one_line

ALL = "all"
_PLACE = re.compile(r"(\d{1,18})(?:/(\d{1,9}))?")
_PLACE_HELP = "ROW, ROW/SAMPLE, or `all` that still wait; repeat for more"


def review(
    job: o.JobId,
    release: Annotated[
        list[str] | None,
        typer.Option("--release", help=f"publish these: {_PLACE_HELP}", show_default=False),
    ] = None,
    block: Annotated[
        list[str] | None,
        typer.Option("--block", help=f"never publish these: {_PLACE_HELP}", show_default=False),
    ] = None,
    local: Annotated[
        bool,
        typer.Option(
            "--local", help="publish the output again in this process, with --release or --block"
        ),
    ] = False,
    json: o.Json = False,
) -> None:
    """List the completions of a job that policies hold back for review; release or block them.

    A decision is final and goes into the audit log. The output is then published again, with a
    manifest that says which revision it is.
    """
    settings = load_settings()
    with client(settings) as c:
        row = c.job(job)
        with closing(make_store(settings)) as store:
            reviews = store.reviews(row.job_id)
            decided = _decisions(row, reviews, release or (), block or ())
            if not decided:
                if local:
                    raise UsageError("--local publishes decisions: give --release or --block")
                found = held_completions(settings, store, row, reviews)
                with while_read():
                    _list(row, reviews, found, json)
                return
            check_readable(row, reviews, decided, held_completions(settings, store, row, reviews))
        c.review(row.job_id, decided)
        if not local:
            _say_decided(row, decided, json)
            return
        from specbatch.jobs.cli.local import run_here

        run_here(settings, spec_of(row), c.job(row.job_id))
        finish(c, row.job_id, json)


def _decisions(
    row: JobRow, reviews: Reviews, release: Sequence[str], block: Sequence[str]
) -> dict[Place, Decided]:
    """What to decide, by completion. Raises `UsageError`."""
    if ALL in release and ALL in block:
        raise UsageError("all that wait are both released and blocked: say one")
    decided: dict[Place, Decided] = {}
    for given, decision in ((release, Decided.RELEASED), (block, Decided.BLOCKED)):
        for place in _places(given, reviews):
            if decided.setdefault(place, decision) is not decision:
                raise UsageError(f"row {called(place)} is both released and blocked: say one")
    left = [place for place in reviews.pending if place not in decided]
    for given, decision in ((release, Decided.RELEASED), (block, Decided.BLOCKED)):
        if ALL in given:
            decided |= dict.fromkeys(left, decision)
            left = []
    if (release or block) and not decided:
        raise UsageError(f"no completion of job {row.job_id} waits for a review")
    return decided


def _places(given: Sequence[str], reviews: Reviews) -> Iterator[Place]:
    """A row without a sample stands for those of its samples that wait."""
    for one in given:
        if one == ALL:
            continue
        match = _PLACE.fullmatch(one)
        if match is None:
            raise UsageError(
                f"{one!r:.40} is no completion: write the number of its row, or ROW/SAMPLE, or "
                f"{ALL}; repeat the option for more"
            )
        number = int(match[1])
        waiting = [place for place in reviews.pending if place[0] == number]
        if match[2] is not None or not waiting:
            yield number, int(match[2] or 0)
        else:
            yield from waiting


def _list(
    row: JobRow, reviews: Reviews, found: Mapping[Place, CompletionRecord], json: bool
) -> None:
    several = any(sample for _, sample in reviews.held)
    for place in reviews.pending:
        one, why = found.get(place), reviews.held[place].why
        if json:
            number, sample = place
            known = {"row_index": number, "sample_index": sample, "why": why}
            say_json(known | {"id": one and one.row_id, "text": one and one.text})
        else:
            named = f" ({one_line(one.row_id)})" if one else ""
            say(f"row {called(place, several)}{named}: {why}")
            say(f"    {one_line(one.text) if one else UNREAD}")
    if not json:
        waiting = len(reviews.pending)
        count = "nothing waits" if not waiting else f"{waiting:,} wait{'s' if waiting == 1 else ''}"
        say(f"job {row.job_id}: {count} for a review")


def waiting_line(row: JobRow, reviews: Reviews) -> str | None:
    """How many completions wait for a person, and the command to decide with."""
    count = len(reviews.pending)
    if not count:
        return None
    completions = "completion waits" if count == 1 else "completions wait"
    return (
        f"{count:,} {completions} for a review: `specbatch review {row.job_id}` shows them, "
        "--release and --block decide"
    )


def _say_decided(row: JobRow, decided: Mapping[Place, Decided], json: bool) -> None:
    released = sum(one is Decided.RELEASED for one in decided.values())
    blocked = len(decided) - released
    if json:
        say_json({"job": row.job_id, "released": released, "blocked": blocked})
    else:
        say(
            f"job {row.job_id}: {released:,} released, {blocked:,} blocked; a worker publishes the "
            f"output again, or `specbatch retry {row.job_id} --local` here"
        )
