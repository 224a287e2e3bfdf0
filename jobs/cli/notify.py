"""`specbatch notify`: send the notifications that are due, or try a target."""

from __future__ import annotations

import time
from contextlib import closing
from datetime import UTC, datetime
from typing import Annotated

import typer

from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import say
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.runtime.lineage import make_lineage
from specbatch.pipeline.runtime.notifier import Notifier, send
from specbatch.schemas.errors import ObjectError, UsageError
from specbatch.schemas.lineage import TARGET
from specbatch.schemas.notifications import FILE, load_targets


def notify(
    test: Annotated[
        str | None,
        typer.Option("--test", metavar="TARGET", help="send this target a message to try it"),
    ] = None,
) -> None:
    """Send what targets have not heard of yet; workers do this by themselves.

    Targets are in the file that SPECBATCH_NOTIFY_FILE names. Lineage goes where OpenLineage's own
    configuration says.
    """
    settings = load_settings()
    told = make_lineage(settings.docs_url)
    if not settings.notify_file and (told is None or test is not None):
        raise UsageError(f"{FILE} is not set: name the YAML file with your targets")
    targets = load_targets(settings.notify_file) if settings.notify_file else {}
    if test is None:
        with closing(make_store(settings)) as store:
            lineage = {} if told is None else {TARGET: told}
            sent = Notifier(store, {**targets, **lineage}).send_due()
        if told is not None:
            told.close()
        say(f"sent {sent:,} notification{'' if sent == 1 else 's'}")
        return
    if test not in targets:
        known = ", ".join(targets) or "none"
        raise UsageError(f"{settings.notify_file} has no target {test!r}; it has {known}")
    try:
        send(targets[test], _example(), time.time())
    except ObjectError as error:
        raise UsageError(f"target {test}: {error}; see its entry in {FILE}") from None
    say(f"target {test} took the message")


def _example() -> dict[str, object]:
    """A message of the usual form, of no job."""
    at = datetime.now(UTC)
    return {
        "id": f"test-{at:%Y%m%d%H%M%S%f}",
        "type": "job.done",
        "at": at.isoformat(timespec="milliseconds"),
        "job_id": "test",
        "name": "test",
        "tenant": "default",
        "state": "done",
        "reason": None,
        "rows_total": 0,
        "rows_done": 0,
        "rows_failed": 0,
        "cost_usd": 0.0,
        "output_uri": "this is a test",
    }
