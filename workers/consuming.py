"""Whether this process can take messages from the broker.

A worker that takes no messages looks well from outside: its process runs and sends heartbeats. Its
consumer reports to this object, and health checks and metrics ask it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

from celery import Celery

from specbatch.schemas.errors import BrokerLostError, first_line

SETTLED_SEC = 2.0  # a consumer counts once it has run for so long
STEADY_SEC = 10.0  # one that ran for so long was not a failed attempt
STUCK_SEC = 30.0  # a loop that does not turn for so long hears nothing
FIRST_PAUSE_SEC, MOST_PAUSE_SEC = 0.2, 10.0

MOST_CHARACTERS = 300  # of a client library's error
NOT_YET = "it has not connected yet"


class Consuming:
    """Thread-safe: the consumer's thread reports, others ask."""

    def __init__(
        self,
        most_failures: int = 0,
        on_lost: Callable[[BrokerLostError], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_lost` ends the worker after so many failures in a row; 0: it never ends."""
        self.most_failures = most_failures
        self.on_lost = on_lost
        self._clock = clock
        self._lock = threading.Lock()
        self._running_since: float | None = None
        self._turned_at: float | None = None  # of a loop that reports its turns
        self._trouble: str | None = NOT_YET
        self._failures = 0

    def runs(self) -> None:
        """The consumer waits for messages. It connects to Redis no earlier than that, so it counts
        as connected only after a while."""
        with self._lock:
            self._running_since = self._clock()
            self._turned_at = None

    def turned(self) -> None:
        """The consumer's loop turns."""
        with self._lock:
            self._turned_at = self._clock()

    def failed(self, error: BaseException) -> int:
        """The consumer could not connect, or lost its connection; failures in a row so far."""
        with self._lock:
            ran = self._ran_sec()
            self._failures = 1 if ran >= STEADY_SEC else self._failures + 1
            self._running_since = None
            self._trouble = first_line(error, MOST_CHARACTERS)
            return self._failures

    @property
    def pause_sec(self) -> float:
        """How long to wait before the next attempt: longer each time."""
        doubled = FIRST_PAUSE_SEC * 2.0 ** min(self._failures - 1, 16)
        return min(MOST_PAUSE_SEC, doubled)

    def trouble(self) -> str | None:
        """Why no messages can be taken, in words; None if they can."""
        with self._lock:
            if self._running_since is None:
                return self._trouble
            if self._turned_at is not None and self._clock() - self._turned_at > STUCK_SEC:
                return "the broker does not answer"
            if self._ran_sec() >= SETTLED_SEC:
                self._trouble = None
            return self._trouble

    def _ran_sec(self) -> float:
        return 0.0 if self._running_since is None else self._clock() - self._running_since


_of_apps: WeakKeyDictionary[Celery, Consuming] = WeakKeyDictionary()


def consuming_of(app: Celery) -> Consuming:
    """That of an app's worker in this process."""
    return _of_apps.setdefault(app, Consuming())


def tell(app: Celery, consuming: Consuming) -> Consuming:
    """Have the app's consumer report to this one. Call it before the consumer is made."""
    _of_apps[app] = consuming
    return consuming
