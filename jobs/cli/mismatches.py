"""`specbatch mismatches`: which draft tokens were refused most, and on rows of which tags."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from specbatch.jobs.cli.console import remark, say, say_json, show_whole
from specbatch.jobs.cli.stores import found_settings
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.operations.mismatches import Mismatches
from specbatch.pipeline.operations.mismatches import mismatches as find
from specbatch.schemas.records import NO_TAG


def mismatches(
    tenant: Annotated[str, typer.Option("--tenant", help="whose jobs")] = "default",
    days: Annotated[
        float, typer.Option("--days", min=0, help="jobs that ended in so many last days")
    ] = 7.0,
    top: Annotated[int, typer.Option("--top", min=1, help="how many of each")] = 20,
    json: Annotated[bool, typer.Option("--json", help="one JSON object on one line")] = False,
) -> None:
    """Show which draft tokens verifiers refused most, and on rows of which tags or languages.

    Purged jobs are left out. Jobs that keep no texts are counted by the digests of their tags.
    """
    with closing(make_store(found_settings())) as store:
        found = find(store, tenant, days, top)
    if json:
        say_json(asdict(found))
        return
    say(found.sentence)
    if found.refused:
        show_whole(_tokens(found))
        show_whole(_tags(found))
    if found.without_texts:
        remark(
            f"{found.without_texts:,} of the jobs do not keep all texts: their tokens are missing"
        )


def _tokens(found: Mismatches) -> Table:
    table = _table("refused token", "id", "verifier")
    for one in found.tokens:
        shown = "?" if one.text is None else repr(one.text)
        table.add_row(
            *(f"{one.count:,}", f"{one.share:.1%}", Text(shown), str(one.token_id)),
            Text(one.verifier),
        )
    return table


def _tags(found: Mismatches) -> Table:
    table = _table("tag", "of tokens proposed")
    for one in found.tags:
        tag = NO_TAG if one.tag is None else one.tag
        table.add_row(
            *(f"{one.refused:,}", f"{one.share:.1%}", Text(tag), f"{one.per_proposed:.1%}")
        )
    return table


def _table(*others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("refused", "share"):
        table.add_column(heading, justify="right")
    for heading in others:
        table.add_column(heading, overflow="fold")
    return table
