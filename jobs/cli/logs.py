"""`specbatch logs JOB`: what workers logged about a job."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from threading import Event
from typing import Annotated, Any

import typer

from specbatch.jobs.cli.console import remark, say, while_read, write
from specbatch.jobs.cli.options import JobId
from specbatch.jobs.cli.stores import found_settings
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.observe.tracing.job_logs import (
    LogReader,
    logs_of,
    workers_in,
    workspace_of,
)
from specbatch.schemas.errors import UsageError
from specbatch.schemas.records import JobRow
from specbatch.schemas.settings import Settings
from specbatch.schemas.visible import visible_json

_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
FOLLOW_SEC = 0.5
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}

Fields = Mapping[str, Any]


class Level(StrEnum):
    """Levels of records, from the least."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"

    @property
    def number(self) -> int:
        return logging.getLevelNamesMapping()[self.value.upper()]


def logs(
    job: JobId,
    worker: Annotated[
        str, typer.Option("--worker", help="only workers whose name has this in it")
    ] = "",
    level: Annotated[
        Level, typer.Option("--level", help="only records of this level or above")
    ] = Level.DEBUG,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            help="only records from then on: 10m, 2h, 3d ago, or a time: 2026-01-31T02:30",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="print what is logged next too, to the job's end")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="one JSON object per record, with all its ids")
    ] = False,
) -> None:
    """Print what workers logged about a job.

    Workers keep it in their workspace for SPECBATCH_JOB_LOG_DAYS days. Records that
    belong to no single job are only in the worker's own log, on its stderr.
    """
    settings, begin = found_settings(), "" if since is None else time_of(since)
    with closing(make_store(settings)) as store:
        row = store.get_job(job)
        folders = folders_of(settings, row)
        readers = [LogReader(folder, worker) for folder in folders]

        def print_new() -> None:
            for reader in readers:
                for fields in reader.new():
                    if is_wanted(fields, level, begin):
                        _print(fields, json)
            sys.stdout.flush()

        with _readable(row), while_read():
            _tell_where(settings, row, folders)
            print_new()
            if follow:
                _follow(store, row, print_new)


def _follow(store: Store, job: JobRow, print_new: Callable[[], None]) -> None:
    """Ctrl-C ends it as the job's end does."""
    pause = Event()
    with suppress(KeyboardInterrupt):
        while not job.state.is_final:
            pause.wait(FOLLOW_SEC)
            job = store.get_job(job.job_id)  # before the records: those of its end are there then
            print_new()


def _tell_where(settings: Settings, job: JobRow, folders: list[Path]) -> None:
    found = [folder for folder in folders if workers_in(folder)]
    if not found:
        remark(_nothing(settings, job, folders))
    for folder in found:
        count = len(workers_in(folder))
        remark(f"logs of {count:,} worker{'s' if count != 1 else ''}: {folder}")


@contextmanager
def _readable(row: JobRow) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise UsageError(
            f"the logs of job {row.job_id} belong to another user ({error.filename}): run this as "
            "the workers' user, or let them set SPECBATCH_STORE_MODE=group"
        ) from None


def folders_of(settings: Settings, job: JobRow) -> list[Path]:
    """Where workers keep what they log about the job: in its workspace, and in that of the
    settings. Raises `UsageError` if neither is a folder."""
    workspaces = dict.fromkeys([workspace_of(job.workspace_uri), settings.workspace])
    found = [logs_of(workspace, job.job_id) for workspace in workspaces if workspace]
    if not any(found):
        raise UsageError(
            f"the workspace {settings.workspace} is not a local folder, so workers keep no logs "
            "of single jobs: look at their stderr (SPECBATCH_LOG_FORMAT=json names the job)"
        )
    return [folder for folder in found if folder is not None]


def time_of(since: str, now: datetime | None = None) -> str:
    """An age or a time as records have it, which sorts as text. Raises `UsageError`."""
    return moment_of("--since", since, now).isoformat(timespec="milliseconds")


def moment_of(flag: str, text: str, now: datetime | None = None) -> datetime:
    """An age or a time, in UTC. Raises `UsageError`, which names the flag."""
    try:
        if found := _AGE.fullmatch(text.strip()):
            ago = timedelta(**{_UNITS[found[2]]: float(found[1])})
            return ((now or datetime.now(UTC)) - ago).astimezone(UTC)
        return datetime.fromisoformat(text.strip()).astimezone(UTC)
    except OverflowError:
        raise UsageError(
            f"{flag} {text!r:.50} is before the year 1 or after 9999: write a time between"
        ) from None
    except ValueError:
        raise UsageError(
            f"{flag} {text!r} is neither an age nor a time: write 10m, 2h, 3d or 2026-01-31T02:30"
        ) from None


def is_wanted(fields: Fields, level: Level, begin: str) -> bool:
    """Whether a record has at least this level, and is not from before `begin`."""
    number = logging.getLevelNamesMapping().get(str(fields.get("level")), logging.CRITICAL)
    return number >= level.number and fields["time"] >= begin


def _print(fields: Fields, json: bool) -> None:
    if json:
        write(visible_json(fields) + "\n")
        return
    for line in lines_of(fields):
        say(line)


def lines_of(fields: Fields) -> Iterator[str]:
    """A record as text: one line, then its traceback."""
    group = fields.get("group")
    unit = " ".join(
        [str(fields.get("stage") or "")] + ([] if group is None else [f"group {group}"])
    ).strip()
    who = f"{fields['worker']}{f' ({unit})' if unit else ''}"
    yield f"{fields['time']} {fields.get('level')} {who}: {fields.get('message')}"
    for line in str(fields.get("traceback") or "").splitlines():
        yield f"    {line}"


def _nothing(settings: Settings, job: JobRow, folders: list[Path]) -> str:
    places = " and ".join(map(str, folders))
    if not settings.job_log_days:
        return f"no logs of job {job.job_id} in {places}: SPECBATCH_JOB_LOG_DAYS is 0"
    if not job.state.is_final:
        return (
            f"no logs of job {job.job_id} in {places} yet: its workers have logged nothing about "
            "it, or they have another workspace"
        )
    return (
        f"no logs of job {job.job_id} in {places}: workers logged nothing about it, its "
        f"{settings.job_log_days:g} days are over, or they have another workspace"
    )
