"""Celery's consumer, which takes only what `guard.py` lets through."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from celery.worker.consumer import Consumer
from kombu import compression
from kombu.message import Message

from specbatch.workers.guard import RefusedMessageError, check

log = logging.getLogger(__name__)

# A loop without a hub (the broker in memory) acknowledges only between two waits for messages. When
# all tasks that may be in hand are, none comes before that: Celery's two seconds would be lost.
_WAIT_SEC = 0.02

# What a client library raises over bytes that are no message at all. They are off the queue by
# then, so to connect anew is enough; without this they would end the worker.
_MALFORMED = (ValueError, TypeError, AttributeError, KeyError)


class CheckedConsumer(Consumer):  # type: ignore[misc]  # celery has no types
    """Refused messages are dropped with one line in the log (or dead-lettered, where a broker's
    policy says so); the worker goes on."""

    class Blueprint(Consumer.Blueprint):  # type: ignore[misc]  # celery has no types
        # Nothing of ours is for later; with quorum queues this step would declare 28 of them.
        default_steps = [  # noqa: RUF012 - as the base has it
            step for step in Consumer.Blueprint.default_steps if "delayed_delivery" not in step
        ]

    connection_errors: tuple[type[Exception], ...]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.connection_errors = (*self.connection_errors, *_MALFORMED)

    def loop_args(self) -> tuple[Any, ...]:
        consumer, connection, *rest = super().loop_args()
        return consumer, _Brisk(connection) if self.hub is None else connection, *rest

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
    """A connection on which nobody waits for long."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def drain_events(self, timeout: float) -> Any:
        return self._connection.drain_events(timeout=min(timeout, _WAIT_SEC))


def refuse_compression() -> None:
    """Make kombu unpack nothing in this process: it would do so before anybody sees the size."""
    compression._decoders.clear()
