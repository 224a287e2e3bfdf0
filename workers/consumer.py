"""Celery's consumer. It accepts what `guard.py` accepts, and reports whether it is connected.

A worker that takes no messages looks well from outside: its process runs and sends heartbeats. Its
consumer reports to `Consuming`, and health checks and metrics ask that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from celery.worker import state
from celery.worker.consumer import Consumer
from kombu import compression
from kombu.connection import Connection
from kombu.message import Message

from specbatch.schemas.errors import BrokerLostError, first_line
from specbatch.schemas.masking import mask_url
from specbatch.workers.broker import NO_LEADER, replace_leaderless
from specbatch.workers.guard import MOST_CHARACTERS, RefusedMessageError, check

log = logging.getLogger(__name__)

# A loop without a hub (the broker in memory) acknowledges only between two waits for messages. When
# all tasks that may be in hand are, none comes before that: Celery's two seconds would be lost.
_WAIT_SEC = 0.02
_LOOK_SEC = 0.2  # between two checks whether the worker must end, while it waits to connect
_TURN_SEC = 1.0  # between two signs that the loop turns

# What a client library raises over bytes that are no message at all. They are off the queue by
# then, so to connect anew is enough; without this they would end the worker.
_MALFORMED = (ValueError, TypeError, AttributeError, KeyError)

SETTLED_SEC = 2.0  # a consumer counts once it has run for so long
STEADY_SEC = 10.0  # one that ran for so long was not a failed attempt
STUCK_SEC = 30.0  # a loop that does not turn for so long hears nothing
FIRST_PAUSE_SEC, MOST_PAUSE_SEC = 0.2, 10.0
NOT_YET = "it has not connected yet"


class Consuming:
    """Whether this process can take messages. Thread-safe: the consumer reports, others ask.

    The consumer reports to the `consuming` of its app.
    """

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


class CheckedConsumer(Consumer):  # type: ignore[misc]  # celery has no types
    """Drops refused messages with one line in the log (or dead-letters them, if the broker's policy
    says so); the worker continues.

    It counts failed connections, also those that fail after a moment: Celery counts only those that
    fail at once, and retries the others five times a second.
    """

    class Blueprint(Consumer.Blueprint):  # type: ignore[misc]  # celery has no types
        # We delay nothing; with quorum queues this step would declare 28 queues.
        default_steps = [  # noqa: RUF012 - as the base has it
            step for step in Consumer.Blueprint.default_steps if "delayed_delivery" not in step
        ]

    connection_errors: tuple[type[Exception], ...]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.connection_errors = (*self.connection_errors, *_MALFORMED)
        self._consuming = getattr(self.app, "consuming", None) or Consuming()

    def loop_args(self) -> tuple[Any, ...]:
        """What Celery's loop begins with: from here on messages can be taken."""
        consumer, connection, *rest = super().loop_args()
        self._consuming.runs()
        if self.hub is not None:
            self._consuming.turned()  # a loop that stops before its first turn is noticed, too
            self.hub.call_repeatedly(_TURN_SEC, self._consuming.turned)
        return consumer, _Brisk(connection) if self.hub is None else connection, *rest

    def ensure_connected(self, conn: Connection) -> Connection:
        """Try each of the broker's URLs once; `start` retries."""
        others = max(0, len(conn.alt or ()) - 1)
        conn.ensure_connection(
            max_retries=others, interval_start=0, reraise_as_library_errors=False
        )
        return conn

    def on_connection_error_before_connected(self, exc: Exception) -> None:
        self._try_again(exc)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        with suppress(Exception):  # it is lost anyway
            self.connection.collect()
        self._try_again(exc)

    def _try_again(self, error: Exception) -> None:
        """Wait before the next attempt; after too many in a row, end the worker."""
        failures, most = self._consuming.failed(error), self._consuming.most_failures
        shown, why = mask_url(self.app.conf.broker_url or ""), first_line(error, MOST_CHARACTERS)
        log.warning(
            "no messages can be taken from the broker %s: %s; attempt %d%s",
            shown,
            why,
            failures,
            f" of {most}" if most else "",
        )
        if most and failures >= most:
            self._consuming.on_lost(
                BrokerLostError(
                    f"no messages could be taken from the broker {shown} in {failures} attempts "
                    f"({why}): see that it runs and what is in it, then restart "
                    "the worker"
                )
            )
        if getattr(error, "code", None) == NO_LEADER:
            with suppress(Exception):  # the next attempt says what is wrong
                replace_leaderless(self.app, self.app.amqp.queues.consume_from)
        until = time.monotonic() + self._consuming.pause_sec
        while True:
            state.maybe_shutdown()
            if (left := until - time.monotonic()) <= 0:
                return
            time.sleep(min(_LOOK_SEC, left))

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Message], None]:
        take = super().create_task_handler(*args, **kwargs)

        def on_message(message: Message) -> None:
            try:
                check(message)
            except RefusedMessageError as error:
                log.warning("a message is refused: %s", error)
                message.reject_log_error(log, self.connection_errors)
                return
            take(message)

        return on_message


class _Brisk:
    """A connection that never waits for long."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def drain_events(self, timeout: float) -> Any:
        return self._connection.drain_events(timeout=min(timeout, _WAIT_SEC))


def refuse_compression() -> None:
    """Make kombu decompress nothing in this process: it would do so before we see the size."""
    compression._decoders.clear()
