"""Refill requests out, hints in: a verify worker's own queue, and a thread for each direction.

Hints are not tasks: the pool's threads all wait for their groups, and a hint is useful only until
those are done. So a consumer of its own reads the queue, which costs microseconds a message.
Nothing here is durable: messages expire, and so does a queue that is not read. (A transient queue
would do, but RabbitMQ is about to refuse those that several may write to.)
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
from collections.abc import Callable
from typing import Any

from celery import Celery
from kombu.entity import Queue
from kombu.message import Message
from kombu.messaging import Consumer
from kombu.mixins import ConsumerMixin
from pydantic import ValidationError

from specbatch.schemas.messages import (
    HINT_EXPIRES_SEC,
    MAX_HINT_BYTES,
    HintMessage,
    RefillMessage,
)
from specbatch.schemas.records import Stage
from specbatch.schemas.routing import queue_for
from specbatch.workers.guard import REFILL_TASK, RefusedMessageError, parsed, wrong_fields

log = logging.getLogger(__name__)

QUEUE_EXPIRES_SEC = 60.0
_MOST_UNSENT = 256
_CLOSE_SEC = 5.0
_PAUSE_SEC = 1.0  # before it connects anew


def hint_queue(name: str) -> Queue:
    """How reader and writers declare it, alike."""
    return Queue(
        name,
        routing_key=name,
        durable=True,
        expires=QUEUE_EXPIRES_SEC,
        message_ttl=HINT_EXPIRES_SEC,
    )


def send_hint(app: Celery, reply_to: str, message: HintMessage) -> None:
    """Raises what the broker's client raises; a hint is then lost."""
    with app.producer_or_acquire() as producer:
        producer.publish(
            message.model_dump(mode="json"),
            serializer="json",
            exchange="",
            routing_key=reply_to,
            declare=[hint_queue(reply_to)],  # on Redis this is also what lets it expire
            expiration=HINT_EXPIRES_SEC,
            delivery_mode="transient",
            retry=False,
        )


class RefillChannel(ConsumerMixin):
    """This process's requests to the proposers, and their hints. `reply_to` is its queue."""

    def __init__(self, app: Celery) -> None:
        self.reply_to = f"hints.{secrets.token_hex(16)}"
        self._app = app
        self.connection = app.connection_for_read()
        self._unsent: queue.Queue[tuple[str, RefillMessage] | None] = queue.Queue(_MOST_UNSENT)
        self._on_hint: Callable[[HintMessage], None] = lambda _: None
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._read_all, "hints"), (self._send_all, "refills"))
        ]

    def start(self, on_hint: Callable[[HintMessage], None]) -> None:
        self._on_hint = on_hint
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self.should_stop = True
        self._closed.set()
        with contextlib.suppress(queue.Full):  # then the broker is away; the thread is a daemon
            self._unsent.put_nowait(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_CLOSE_SEC)
        self.connection.release()

    def ask(self, proposer: str, message: RefillMessage) -> None:
        """Send it soon, or never: the caller does not wait."""
        try:
            self._unsent.put_nowait((proposer, message))
        except queue.Full:
            log.debug("a refill request is dropped: the broker is slow")

    # --- in its threads ------------------------------------------------------------------------
    def _read_all(self) -> None:
        """Read hints until `close`. kombu's own loop logs a traceback for each lost connection, and
        ends with the thread for what it does not expect."""
        while not self.should_stop:
            try:
                for _ in self.consume(limit=None):  # type: ignore[no-untyped-call]  # kombu has no types
                    pass
            except Exception as error:  # brokers raise many kinds for one meaning
                log.info("hint consumer disconnected, reconnecting: %s", error)
                self._closed.wait(_PAUSE_SEC)

    def get_consumers(self, consumer: Callable[..., Consumer], _: Any) -> list[Consumer]:
        return [
            consumer(
                queues=[hint_queue(self.reply_to)],
                on_message=self._receive,
                accept=["json"],
                no_ack=True,
            )
        ]

    def on_connection_error(self, exc: Exception, interval: float) -> None:
        log.info("hint consumer disconnected, reconnecting in %.0f s: %s", interval, exc)

    def on_decode_error(self, message: Message, exc: Exception) -> None:  # noqa: ARG002 - the hook
        log.warning("dropped a malformed hint message: it cannot be read (%s)", type(exc).__name__)

    def _receive(self, received: Message) -> None:
        try:
            message = HintMessage.model_validate(parsed(received, MAX_HINT_BYTES))
        except ValidationError as error:
            log.warning("dropped a malformed hint message: %s", wrong_fields(error))
            return
        except RefusedMessageError as error:
            log.warning("dropped a malformed hint message: %s", error)
            return
        self._on_hint(message)

    def _send_all(self) -> None:
        while (item := self._unsent.get()) is not None:
            proposer, message = item
            try:
                self._app.send_task(
                    REFILL_TASK,
                    kwargs=message.model_dump(mode="json"),
                    queue=queue_for(Stage.PROPOSE, proposer),
                    expires=HINT_EXPIRES_SEC,
                    retry=False,
                )
            except Exception as error:  # brokers raise many kinds for one meaning
                log.info("a refill request is lost: %s", error)
