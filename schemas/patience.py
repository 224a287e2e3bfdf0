"""Limits how long a command waits for a server, and how long it waits silently.

Within two seconds a command tells its user that it waits for a server, and for how long. Another
thread does the work, so that the command can also report and give up a server that accepts a
connection and never answers. Only a command's own thread waits in this way; workers do not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

T = TypeVar("T")

NOTICE_SEC = 1.5
LEAST_SEC = 1.0  # every server gets this time to answer, however little of the timeout is left
_POLL_SEC = 0.1  # between two checks whether it has answered, or must be asked again


class NoAnswerError(Exception):
    """A server did not answer in time; the message names it."""


@dataclass(slots=True)
class Patience:
    """The waiting state of one command."""

    notice: Callable[[str], None]
    deadline: float | None = None  # by `time.monotonic`: the command's own timeout
    announced: set[str] = field(default_factory=set)  # silent servers that the user knows of


_current: ContextVar[Patience | None] = ContextVar("patience", default=None)


@dataclass(slots=True)
class Asking:
    """The work of a thread: whether its server has answered, and its result."""

    is_awaited: bool = False  # else nobody waits for the answer, so asking is not worth it
    done: threading.Event = field(default_factory=threading.Event)
    silent_since: float | None = field(default_factory=time.monotonic)  # None: it has answered
    result: Any = None
    error: BaseException | None = None

    def asks(self) -> None:
        """An answer is missing from here on. Asking again changes nothing."""
        if self.silent_since is None:
            self.silent_since = time.monotonic()

    def answered(self) -> None:
        """The server is up and works."""
        self.silent_since = None

    def run(self, work: Callable[[Asking], Any]) -> None:
        try:
            self.result = work(self)
        except BaseException as error:  # it is raised where it is waited for
            self.error = error
        self.done.set()


NOBODY = Asking()  # for work that nobody waits for


@contextmanager
def patient(notice: Callable[[str], None]) -> Iterator[None]:
    """In this thread, report servers that do not answer to `notice`."""
    token = _current.set(Patience(notice))
    try:
        yield
    finally:
        _current.reset(token)


def end_within(timeout_sec: float | None) -> None:
    """Limit all further waiting of this thread for servers; None removes the limit."""
    if (patience := _current.get()) is not None:
        patience.deadline = None if timeout_sec is None else time.monotonic() + timeout_sec


def patiently(server: str, budget_sec: float, work: Callable[[Asking], T]) -> T:
    """Do `work` in a thread and return its result.

    `work` reports when it asks the server and when it has an answer. While it has one, only the
    command's own timeout ends it.

    Raises `NoAnswerError` when there was no answer in `budget_sec`, or too late for the timeout.
    """
    patience = _current.get()
    if patience is None:
        return work(NOBODY)
    doing = Asking(is_awaited=True)
    threading.Thread(target=doing.run, args=(work,), name="waiting", daemon=True).start()
    while not doing.done.wait(_POLL_SEC):
        _poll(doing, patience, server, budget_sec)
    patience.announced.discard(server)
    if doing.error is not None:
        raise doing.error
    done: T = doing.result
    return done


def _poll(doing: Asking, patience: Patience, server: str, budget_sec: float) -> None:
    """Report once that the server does not answer; raise `NoAnswerError` at the limit."""
    now, since, end = time.monotonic(), doing.silent_since, patience.deadline
    if since is None:
        patience.announced.discard(server)
        if end is not None and now >= end:
            raise NoAnswerError(
                f"{server} was still working at {_clock(now)}, when the command's --timeout ended: "
                "give it more time"
            )
        return
    until = since + budget_sec
    if end is not None:
        until = min(until, max(end, since + LEAST_SEC))
    if now >= until:
        raise NoAnswerError(
            f"{server} did not answer until {_clock(now)}: check that it runs and can be reached"
        )
    if now - since >= NOTICE_SEC and server not in patience.announced:
        patience.notice(f"{server} does not answer, trying again until {_clock(until)}")
        patience.announced.add(server)


def _clock(at: float) -> str:
    """A time of `time.monotonic` as wall-clock time."""
    when = datetime.now(UTC) + timedelta(seconds=at - time.monotonic())
    return when.strftime("%H:%M:%S UTC")
