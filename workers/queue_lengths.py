"""How many bells wait in a queue: a sweeper adds those that are missing, and no more."""

from __future__ import annotations

import logging
from collections.abc import Callable

from celery import Celery

from specbatch.schemas.records import Bell
from specbatch.schemas.routing import queue_for

log = logging.getLogger(__name__)


def make_queued(app: Celery) -> Callable[[Bell], tuple[str, int]]:
    """What tells the queue that a bell rings on, and how many messages wait there.

    Those that workers have taken already are not counted. A queue that is not there, or a broker
    that does not answer, has none: ringing too often is harmless.
    """

    def queued(bell: Bell) -> tuple[str, int]:
        name = queue_for(bell.stage, bell.model, bell.priority)
        try:
            with app.connection_for_write() as connection, connection.channel() as channel:
                return name, int(channel.queue_declare(queue=name, passive=True).message_count)
        except Exception as error:  # brokers raise many kinds, and for a missing queue another
            log.debug("the length of queue %s is not known: %s", name, error)
            return name, 0

    return queued
