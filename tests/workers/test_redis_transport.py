"""A consumer on Redis whose server dies while it holds a message."""

# mypy: disallow-untyped-calls=False
# kombu's methods have no types.

from __future__ import annotations

import logging

import pytest
from kombu.message import Message

from specbatch.workers.broker import transport_options
from specbatch.workers.redis_transport import CheckedConnection
from support.servers import PrivateRedis

log = logging.getLogger(__name__)


def test_a_consumer_goes_on_whose_acknowledgement_was_lost(own_redis: PrivateRedis) -> None:
    """As many messages are in hand as may be, so nothing is asked of the server meanwhile."""
    received: list[str] = []
    held: list[Message] = []
    url = own_redis.url
    with CheckedConnection(url, transport_options=transport_options(url)) as connection:
        queue = connection.SimpleQueue("work").queue
        channel = connection.channel()
        channel.basic_qos(0, 1, False)
        consumer = connection.Consumer(queue, channel=channel, on_message=held.append)
        consumer.consume()
        producer = connection.Producer()
        for text in ("first", "second"):
            producer.publish(text, routing_key="work", declare=[queue])
        connection.drain_events(timeout=10)
        received.append(held[0].decode())

        own_redis.kill()
        held[0].ack_log_error(log, connection.connection_errors)  # as Celery does
        own_redis.restart()

        while len(held) < 2:
            try:
                connection.drain_events(timeout=10)
            except TimeoutError:
                pytest.fail("nothing is asked of the server any more")
            except connection.connection_errors:
                continue  # it has noticed: a worker connects anew here
        received.append(held[1].decode())
    assert received == ["first", "second"]
