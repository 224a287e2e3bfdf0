"""kombu's transport for Redis, hardened against anything that was written into its keys.

Anybody who can write to Redis can put anything into a queue. kombu trusts what it finds: bytes that
are no JSON, or JSON of another shape, end its connection, and the next connection finds more.

Two things would otherwise stop all workers again and again, because the cause stays in Redis:

- What cannot be parsed, in a queue or among the messages that are held unacknowledged, is dropped
  with one warning. No work is lost: a message only points to work, and sweepers enqueue another.
- A key of another type than its name asks for is renamed to `<key>.quarantined`. These names are
  ours alone, so no other program misses the key; its content is kept for an investigation, and one
  such key per name cannot fill the broker. Waiting for a person instead would stop all jobs over
  one stray write.

A third would stop one worker for ever: a message whose acknowledgement is lost with the connection
keeps its place among those that may be in hand. When all places are kept, kombu sends no BRPOP, so
nothing notices that the connection is gone.
"""

# mypy: disallow-untyped-calls=False
# kombu's methods have no types, and they are called by `super()` here.

from __future__ import annotations

import base64
import binascii
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import redis
from kombu.connection import Connection
from kombu.transport.redis import Channel, QoS, Transport
from kombu.transport.virtual import Empty
from redis.exceptions import ResponseError

from specbatch.schemas.errors import first_line
from specbatch.workers.guard import MOST_CHARACTERS

log = logging.getLogger(__name__)

T = TypeVar("T")

_NO_KEY = "none"  # what Redis calls the type of a key that is not there
MOST_BYTES = 1 << 20  # several times what the largest message of ours takes
_SHOWN = 64  # characters of what is quoted
_ENCODINGS = (None, "base64")


class UnreadableError(ValueError):
    """It is no message; the text says why."""


def check_envelope(raw: bytes | str) -> None:
    """Raise `UnreadableError` unless kombu can make a message of it."""
    check_message(_loaded(raw))


def unacked_entry(raw: bytes | str) -> tuple[dict[str, Any], str, str]:
    """(message, exchange, routing key) of a message that a consumer holds unacknowledged."""
    entry = _loaded(raw)
    if not (isinstance(entry, list) and len(entry) == 3):
        raise UnreadableError("it is not a message, its exchange and its routing key")
    message, exchange, routing_key = entry
    if not (isinstance(exchange, str) and isinstance(routing_key, str)):
        raise UnreadableError("its exchange or routing key is not text")
    return check_message(message), exchange, routing_key


def check_message(message: Any) -> dict[str, Any]:
    """The message, if it is one. Raises `UnreadableError`."""
    if not isinstance(message, dict):
        raise UnreadableError("it is not a JSON object")
    properties = message.get("properties")
    if not isinstance(properties, dict) or not _is_text(properties.get("delivery_tag")):
        raise UnreadableError("it has no delivery tag")
    where = properties.get("delivery_info")
    if not isinstance(where, Mapping) or not all(
        isinstance(where.get(name), str) for name in ("exchange", "routing_key")
    ):
        raise UnreadableError("it does not say where it was delivered to")
    if not isinstance(message.get("headers") or {}, dict):
        raise UnreadableError("its headers are not a JSON object")
    kinds = (message.get("content-type"), message.get("content-encoding"))
    if not all(kind is None or isinstance(kind, str) for kind in kinds):
        raise UnreadableError("its content type is not text")
    _check_body(message.get("body"), properties.get("body_encoding"))
    return message


def quoted(value: object) -> str:
    """A name from the broker for a log: short, and without control characters."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return ascii(text[:_SHOWN])


def _check_body(body: Any, encoding: Any) -> None:
    if body is not None and not isinstance(body, str):
        raise UnreadableError("its body is not text")
    if encoding is not None and encoding not in _ENCODINGS:
        raise UnreadableError("its body is encoded in an unknown way")
    if body and encoding == "base64":
        try:
            base64.b64decode(body)
        except (binascii.Error, ValueError):
            raise UnreadableError("its body is not base64") from None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _loaded(raw: bytes | str) -> Any:
    if len(raw) > MOST_BYTES:
        raise UnreadableError(f"it has {len(raw)} bytes, where {MOST_BYTES} are the most")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise UnreadableError("it is not JSON") from None


class CheckedRedis(redis.Redis):
    """A client whose BRPOP returns messages or nothing."""

    def parse_response(self, connection: Any, command_name: Any, **options: Any) -> Any:
        reply = super().parse_response(connection, command_name, **options)
        if command_name == "BRPOP" and reply:
            queue, raw = reply
            try:
                check_envelope(raw)
            except UnreadableError as error:
                log.warning("a message in queue %s is dropped: %s", quoted(queue), error)
                return None
        return reply


class CheckedQoS(QoS):
    """Messages that are held unacknowledged, in a hash and an index."""

    def append(self, message: Any, delivery_tag: str) -> None:
        self.channel.mended(lambda: super(CheckedQoS, self).append(message, delivery_tag))

    def ack(self, delivery_tag: str) -> None:
        self._finish(delivery_tag, super().ack)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        self._finish(delivery_tag, lambda tag: super(CheckedQoS, self).reject(tag, requeue))

    def _finish(self, delivery_tag: str, work: Callable[[str], None]) -> None:
        """Tell Redis. If it cannot be told, another message may be taken all the same.

        Redis then delivers this one again after its visibility timeout. The store knows by then
        that there is nothing to do.
        """
        try:
            self.channel.mended(lambda: work(delivery_tag))
        except (redis.RedisError, OSError) as error:
            self._quick_ack(delivery_tag)
            log.warning(
                "message %s could not be acknowledged (%s): Redis will deliver it again",
                quoted(delivery_tag),
                first_line(error, MOST_CHARACTERS),
            )

    def restore_visible(self, *args: Any, **kwargs: Any) -> None:
        self.channel.mended(lambda: super(CheckedQoS, self).restore_visible(*args, **kwargs))

    def restore_by_tag(self, tag: bytes | str, client: Any = None, leftmost: bool = False) -> None:
        """Put it back into its queue. What cannot be read is dropped in the same transaction."""
        unreadable: list[UnreadableError] = []

        def restore(pipe: Any) -> None:
            raw = pipe.hget(self.unacked_key, tag)
            pipe.multi()
            self._remove_from_indices(tag, pipe)
            unreadable.clear()  # the transaction may be run again
            if not raw:
                return  # acknowledged meanwhile, or flushed
            try:
                message, exchange, routing_key = unacked_entry(raw)
            except UnreadableError as error:
                unreadable.append(error)
                return
            self.channel._do_restore_message(message, exchange, routing_key, pipe, leftmost)

        with self.channel.conn_or_acquire(client) as client:
            client.transaction(restore, self.unacked_key)
        for error in unreadable:
            log.warning("unacknowledged message %s is dropped: %s", quoted(tag), error)


class CheckedChannel(Channel):
    """A channel whose keys have the types that it needs."""

    QoS = CheckedQoS

    def mended(self, work: Callable[[], T], queues: Iterable[str] = ()) -> T:
        """What `work` returns; where a key of another type is in its way, once more without it."""
        try:
            return work()
        except ResponseError as error:
            if not is_wrong_type(error) or not self.move_aside(queues):
                raise
            return work()

    def move_aside(self, queues: Iterable[str] = ()) -> bool:
        """Rename keys of a wrong type, those of further `queues` too; whether there were any."""
        wanted = {self.unacked_key: "hash", self.unacked_index_key: "zset"}
        wanted |= {
            self._q_for_pri(queue, step): "list"
            for queue in (*self.active_queues, *queues)
            for step in self.priority_steps
        }
        with self.conn_or_acquire() as client:
            moved = [_moved(client, key, kind) for key, kind in wanted.items()]
        return any(moved)

    def _get_client(self) -> Any:
        found = super()._get_client()
        return CheckedRedis if found is redis.Redis else found

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)
        except ResponseError as error:
            if not is_wrong_type(error) or not self.move_aside():
                raise
            raise Empty from None  # the next poll asks again

    def _size(self, queue: str) -> int:
        """Declaring a queue asks for this."""
        size = super()._size
        return int(self.mended(lambda: size(queue), (queue,)))

    def _put(self, queue: str, message: Any, **kwargs: Any) -> None:
        put = super()._put
        self.mended(lambda: put(queue, message, **kwargs), (queue,))


class CheckedTransport(Transport):
    """kombu's own with our channel."""

    Channel = CheckedChannel


class CheckedConnection(Connection):
    """A connection of this app; other apps in the process keep kombu's transport."""

    def get_transport_cls(self) -> Any:
        found = super().get_transport_cls()
        return CheckedTransport if found is Transport else found


def is_wrong_type(error: ResponseError) -> bool:
    """Whether a key is of another type than the command needs; pipelines put words before it."""
    return "WRONGTYPE" in str(error)


def _moved(client: Any, key: str, wanted: str) -> bool:
    """Whether the key was of another type, and is out of the way now."""
    kind = _word(client.type(key))
    if kind in (wanted, _NO_KEY):
        return False
    aside = f"{key}.quarantined"
    try:
        client.rename(key, aside)
    except ResponseError as error:
        if "no such key" in str(error):
            return True  # another worker was faster
        log.error(
            "key %s of the broker is a %s where a %s is needed, and may not be renamed (%s): "
            "delete it",
            quoted(key),
            kind,
            wanted,
            error,
        )
        return False
    log.error(
        "key %s of the broker was a %s where a %s is needed: it is %s now, and work continues; "
        "find out who wrote it, then delete it",
        quoted(key),
        kind,
        wanted,
        quoted(aside),
    )
    return True


def _word(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
