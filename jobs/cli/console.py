"""Where commands write, and how an error becomes one line and an exit code.

Results go to stdout, progress and remarks to stderr. Colour only on a terminal. Passwords of URLs
are masked in all of it, in the logs of libraries and in tracebacks too; where some tenant's texts
are not kept, personal data is redacted in logs and tracebacks. What a terminal would obey is
spelled out in all of it (`visible.py`): ids, texts and names are other people's.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import IO, Any, NoReturn, cast

import typer
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from specbatch.pipeline.observe.terminal.plain_console import PlainConsole
from specbatch.pipeline.observe.tracing.logs import JsonFormatter
from specbatch.schemas.errors import SpecbatchError
from specbatch.schemas.masking import masked, masked_log
from specbatch.schemas.patience import patient
from specbatch.schemas.visible import one_line, visible, visible_json

out = PlainConsole()
err = PlainConsole(stderr=True)

PROGRAMS = ("specbatch", "submit-job")
_ANY_WIDTH = 10_000
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
NOT_SUBMITTED = "interrupted: nothing was submitted"
MAYBE_SUBMITTED = "interrupted while the job was stored: `specbatch jobs` says whether it is there"
_CRASHED = 1
_SELDOM = 10_000, 10, 10  # new objects; younger collections before an older one
_formatter = logging.Formatter()
_text_handler: logging.Handler = logging.NullHandler()  # of this program, once it logs

log = logging.getLogger("specbatch.cli")


def show_whole(table: Table) -> None:
    """On stdout, wider than it if need be: rich would cut ids and figures without a sign."""
    needed = out.measure(table, options=out.options.update(max_width=_ANY_WIDTH)).maximum
    PlainConsole(width=max(needed, out.width)).print(table)


@contextmanager
def progress_bar(what: str, total: float | None = None) -> Iterator[Callable[..., None]]:
    """A bar on stderr, where that is a terminal. Yields what updates it: `Progress.update`."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=err, transient=True, disable=not err.is_terminal
    ) as progress:
        yield partial(progress.update, progress.add_task(what, total=total))


def new_app(help_text: str, group: type[TyperGroup] | None = None) -> typer.Typer:
    """A typer app whose errors are ours to show. `group`: the class that holds its commands."""
    return typer.Typer(
        cls=group,
        help=help_text,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def run(app: typer.Typer, prog_name: str) -> NoReturn:
    """Run a command to its exit code; what is not a `SpecbatchError` keeps its traceback."""
    if complete_variable(prog_name) in os.environ:
        from typer._completion_classes import completion_init  # else only by typer's own options

        completion_init()
        err.quiet = True  # a shell shows it in the middle of the line
    begin_process()
    try:
        with patient(remark):
            app(prog_name=prog_name)
    except SpecbatchError as error:
        complain(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception:
        if _logs_json():
            log.critical("the command ends: this is a bug", exc_info=True)
        else:
            sys.stderr.write(visible(masked_log(traceback.format_exc())))
        sys.exit(_CRASHED)
    sys.exit(0)


def complete_variable(program: str) -> str:
    """What a shell sets in the environment of a program to be told completions, as click has it."""
    return f"_{program.replace('-', '_').upper()}_COMPLETE"


def _masked_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
    """A record whose text and traceback show no password, whatever logs it."""
    record = logging.LogRecord(*args, **kwargs)
    try:
        said = record.getMessage()
    except (TypeError, ValueError):  # wrong arguments: the handler will complain of them
        return record
    if (hidden := masked_log(said)) != said:
        record.msg, record.args = hidden, ()
    if record.exc_info and record.exc_info[0] is not None:
        record.exc_text = masked_log(_formatter.formatException(record.exc_info))
    return record


class _VisibleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def begin_process() -> None:
    """In each process that we start, before it imports what it needs.

    Importing torch and transformers makes 300,000 objects that stay. By default all of them are
    looked at again and again: a fifth of a command's start, and then 0.2 s of a worker's lock each
    time that a quarter as many have come.
    """
    gc.set_threshold(*_SELDOM)
    _log_to_stderr()


def _log_to_stderr() -> None:
    """Warnings of workers, beside the progress bar and not through it."""
    logging.setLogRecordFactory(_masked_record)
    global _text_handler
    _text_handler = logging.StreamHandler()
    if err.is_terminal:
        _text_handler = RichHandler(console=err, show_path=False)
    words = "%(message)s" if err.is_terminal else "%(asctime)s %(levelname)s %(message)s"
    _text_handler.setFormatter(_VisibleFormatter(words))
    quieten_libraries()
    logging.basicConfig(level=logging.WARNING, handlers=[_text_handler])
    log.setLevel(logging.INFO)  # remarks, where logs are JSON
    logging.getLogger("specbatch.jobs.serve").setLevel(logging.INFO)  # batches begin and end
    log_as(os.environ.get("SPECBATCH_LOG_FORMAT", "text"))


def quieten_libraries() -> None:
    """Where it is installed, transformers imports torchao, which warns of its parts for GPUs."""
    for library in ("torchao", "torch.utils._pytree"):
        logging.getLogger(library).setLevel(logging.ERROR)


def log_as(kind: str) -> None:
    """`json`: from here on logs, remarks and errors are lines of JSON. Where logging is a host's
    own, it stays as it is."""
    if kind != "json" or _logs_json() or _text_handler not in logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.getLogger().removeHandler(_text_handler)
    logging.getLogger().addHandler(handler)
    logging.captureWarnings(True)
    err.file = cast(IO[str], _Remarks())


class _Remarks(io.TextIOBase):
    """Takes what is printed to stderr into the log, line by line."""

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if line.strip():
                log.info("%s", line)
        return len(text)


def _logs_json() -> bool:
    return isinstance(err.file, _Remarks)


def complain(message: str) -> None:
    """`error: ...` on stderr."""
    text = " ".join(masked(message).split())
    if _logs_json():
        log.error("%s", text)
        return
    err.print(Text.assemble(("error:", "bold red"), " ", visible(text)), soft_wrap=True)


def remark(message: str) -> None:
    """A sentence on stderr."""
    if _logs_json():
        log.info("%s", message)  # one record, however long
        return
    err.print(one_line(masked(message)), markup=False, highlight=False, soft_wrap=True)


def stored(job_id: str) -> str:
    """What a Ctrl-C leaves once a job is stored, in words."""
    return f"interrupted; job {job_id} is stored: `specbatch show {job_id}` says how it stands"


@contextmanager
def if_interrupted(words: str) -> Iterator[None]:
    """Say these words at a Ctrl-C in the block, and end the command."""
    try:
        yield
    except KeyboardInterrupt:
        remark(words)
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def while_read() -> Iterator[None]:
    """Ends the command without a word if stdout is closed: `head`, or a pager, has read enough."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit from None


def moment(at: float) -> str:
    """`2026-01-31 02:30:05 UTC`, of seconds since the epoch."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def say(message: str) -> None:
    """A sentence on stdout."""
    out.print(one_line(message), markup=False, highlight=False, soft_wrap=True)


def say_json(value: Any) -> None:
    """One JSON object on one line of stdout."""
    write(visible_json(value) + "\n")
    sys.stdout.flush()


def write(text: str) -> None:
    """Text for a program on stdout, as it is."""
    sys.stdout.write(text)
