"""`specbatch top`: workers, queues and jobs as they are now."""

from __future__ import annotations

import sys
from contextlib import closing
from threading import Event
from typing import Annotated

import typer
from rich.live import Live
from rich.text import Text

from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import out, say_json
from specbatch.jobs.cli.options import Json
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.observe.terminal.plain_console import PlainConsole
from specbatch.pipeline.observe.terminal.top import WIDE, Board, Watch, as_json, tables
from specbatch.schemas.backlog import is_interrupted
from specbatch.schemas.errors import StoreError
from specbatch.schemas.records import JobState
from specbatch.schemas.timekeeping import LEASES_OF_SILENCE

JOBS = 12  # shown: each costs two statements


def top(
    interval: Annotated[
        float, typer.Option("--interval", help="seconds between two updates", min=0.2)
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="print the current state as plain text, then exit")
    ] = False,
    json: Json = False,
) -> None:
    """Watch workers, queues and jobs until Ctrl-C. Prints once if stdout is not a terminal."""
    settings = load_settings()
    with closing(make_store(settings)) as store:
        watch = Watch(LEASES_OF_SILENCE * settings.lease_sec, settings.lease_sec)
        if json:
            say_json(as_json(snapshot(store, watch)))
        elif once or not out.is_terminal:
            board = snapshot(store, watch)
            plain = PlainConsole(file=sys.stdout, width=max(WIDE, out.width), color_system=None)
            plain.print(tables(board))
        else:
            _watch(store, watch, interval)


def snapshot(store: Store, watch: Watch) -> Board:
    """The present state of the store."""
    running = store.list_jobs(JOBS, JobState.RUNNING)
    queued = store.list_jobs(JOBS - len(running), JobState.QUEUED) if len(running) < JOBS else []
    shown = [(job, store.progress(job.job_id)) for job in (*running, *queued)]
    backlog = store.backlog()
    left_out = max(0, sum(backlog.jobs.values()) - len(shown))
    stopped = {
        job.job_id
        for job, _ in shown
        if is_interrupted(job, store.holders, backlog.workers, watch.lease_sec)
    }
    return watch.board(backlog, shown, left_out, stopped)


def _watch(store: Store, watch: Watch, interval: float) -> None:
    """Ctrl-C is how it is meant to end. A store that does not answer is asked again."""
    wait = Event()
    try:
        with Live(
            tables(snapshot(store, watch), out.width), console=out, screen=True, auto_refresh=False
        ) as live:
            while not wait.wait(interval):
                try:
                    live.update(tables(snapshot(store, watch), out.width), refresh=True)
                except StoreError as error:
                    live.update(Text(f"{error}; trying again", style="red"), refresh=True)
    except KeyboardInterrupt:
        return
