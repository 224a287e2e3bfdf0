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
_LOOK_SEC = 0.1  # between two looks at whether it has answered, or has to be asked anew


class NoAnswerError(Exception):
    """A server gave no answer in time; the text is a sentence that names it."""


@dataclass(slots=True)
class Patience:
    """Of one command."""

    notice: Callable[[str], None]
    deadline: float | None = None  # by `time.monotonic`: the command's own timeout
    told: set[str] = field(default_factory=set)  # servers that have not answered since it was said


_current: ContextVar[Patience | None] = ContextVar("patience", default=None)


class Asking:
    """What work tells of its server: that it asks it, and that it has answered."""

    is_awaited = False  # whether anybody waits for the answer: only then is it worth a question

    def asks(self) -> None:
        """From here on an answer is missing; to ask again because none came changes nothing."""

    def answered(self) -> None:
        """The server is there and works."""


NOBODY = Asking()


@dataclass(slots=True)
class _Work(Asking):
    """What a thread does, and its result."""

    done: threading.Event = field(default_factory=threading.Event)
    silent_since: float | None = field(default_factory=time.monotonic)  # None: it has answered
    result: Any = None
    error: BaseException | None = None

    is_awaited = True

    def asks(self) -> None:
        if self.silent_since is None:
            self.silent_since = time.monotonic()

    def answered(self) -> None:
        self.silent_since = None

    def run(self, work: Callable[[Asking], Any]) -> None:
        try:
            self.result = work(self)
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


def patiently(server: str, budget_sec: float, work: Callable[[Asking], T]) -> T:
    """What `work` returns. It tells when it asks the server and when it has an answer: while it has
    one, only the command's own timeout ends it.

    Raises `NoAnswerError` when there was no answer in `budget_sec`, or too late for the timeout.
    """
    patience = _current.get()
    if patience is None:
        return work(NOBODY)
    doing = _Work()
    threading.Thread(target=doing.run, args=(work,), name="waiting", daemon=True).start()
    while not doing.done.wait(_LOOK_SEC):
        _look(doing, patience, server, budget_sec)
    patience.told.discard(server)
    if doing.error is not None:
        raise doing.error
    done: T = doing.result
    return done


def _look(doing: _Work, patience: Patience, server: str, budget_sec: float) -> None:
    """Say that the server does not answer, once; raise `NoAnswerError` when it is time to."""
    now, since, end = time.monotonic(), doing.silent_since, patience.deadline
    if since is None:
        patience.told.discard(server)
        if end is not None and now >= end:
            raise NoAnswerError(
                f"{server} was still at work at {_clock(now)}, when the command's --timeout ended: "
                "give it more time"
            )
        return
    until = since + budget_sec
    if end is not None:
        until = min(until, max(end, since + LEAST_SEC))
    if now >= until:
        raise NoAnswerError(
            f"{server} did not answer until {_clock(now)}: see that it runs and is reachable"
        )
    if now - since >= NOTICE_SEC and server not in patience.told:
        patience.notice(f"{server} does not answer, trying again until {_clock(until)}")
        patience.told.add(server)


def _clock(at: float) -> str:
    """A time of `time.monotonic` as people have it."""
    when = datetime.now(UTC) + timedelta(seconds=at - time.monotonic())
    return when.strftime("%H:%M:%S UTC")
