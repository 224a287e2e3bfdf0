"""How long a command waits for a server without a word, and how long at all.

Whoever types a command is told within two seconds that it waits for a server, and for how long. A
thread does the work, so that one which accepts a connection and never answers is told of and given
up too. Only the thread of the command itself is patient in this way: workers are not.
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
LEAST_SEC = 1.0  # that a server has to answer, however little of the command's timeout is left


class NoAnswerError(Exception):
    """A server gave no answer in time; the text is a sentence that names it."""


@dataclass(slots=True)
class Patience:
    """Of one command."""

    notice: Callable[[str], None]
    deadline: float | None = None  # by `time.monotonic`: the command's own timeout
    is_told: bool = False  # of a server that has not answered since


_current: ContextVar[Patience | None] = ContextVar("patience", default=None)


@dataclass(slots=True)
class _Work:
    """What a thread does, and what came of it."""

    done: threading.Event = field(default_factory=threading.Event)
    connected: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None

    def run(self, work: Callable[[Callable[[], None]], Any]) -> None:
        try:
            self.result = work(self.connected.set)
        except BaseException as error:  # it is raised where it is waited for
            self.error = error
        self.done.set()


@contextmanager
def patient(notice: Callable[[str], None]) -> Iterator[None]:
    """In this thread, `notice` hears of servers that do not answer."""
    token = _current.set(Patience(notice))
    try:
        yield
    finally:
        _current.reset(token)


def end_within(timeout_sec: float | None) -> None:
    """From now on nothing in this thread waits for a server longer than that; None: no such end."""
    if (patience := _current.get()) is not None:
        patience.deadline = None if timeout_sec is None else time.monotonic() + timeout_sec


def patiently(server: str, budget_sec: float, work: Callable[[Callable[[], None]], T]) -> T:
    """What `work` returns. It is called with what it calls once the server has answered: from then
    on only the command's own timeout ends it.

    Raises `NoAnswerError` when there was no answer in `budget_sec`.
    """
    patience = _current.get()
    if patience is None:
        return work(lambda: None)
    until = time.monotonic() + budget_sec
    if patience.deadline is not None:
        until = min(until, max(patience.deadline, time.monotonic() + LEAST_SEC))
    doing = _Work()
    threading.Thread(target=doing.run, args=(work,), name="waiting", daemon=True).start()
    _wait(doing, patience, server, until)
    patience.is_told = False
    if doing.error is not None:
        raise doing.error
    done: T = doing.result
    return done


def _wait(doing: _Work, patience: Patience, server: str, until: float) -> None:
    left = until - time.monotonic()
    when = (datetime.now(UTC) + timedelta(seconds=left)).strftime("%H:%M:%S UTC")
    if doing.done.wait(min(NOTICE_SEC, left)):
        return
    if not doing.connected.is_set() and not patience.is_told:
        patience.notice(f"{server} does not answer, trying again until {when}")
        patience.is_told = True
    if doing.done.wait(max(0.0, until - time.monotonic())):
        return
    if doing.connected.is_set():  # it works; only what the user asked for ends it
        left_sec = None if patience.deadline is None else patience.deadline - time.monotonic()
        if doing.done.wait(left_sec if left_sec is None else max(0.0, left_sec)):
            return
    raise NoAnswerError(f"{server} did not answer until {when}: see that it runs and is reachable")
