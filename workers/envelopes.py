"""Checks messages on Redis before kombu parses them.

Anybody who can write to Redis can put anything into a queue. kombu trusts what it finds: bytes that
are no JSON, or JSON of another shape, end its connection, and the next connection finds more.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

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
        raise UnreadableError("its exchange or routing key is no text")
    return check_message(message), exchange, routing_key


def check_message(message: Any) -> dict[str, Any]:
    """The message, if it is one. Raises `UnreadableError`."""
    if not isinstance(message, dict):
        raise UnreadableError("it is no JSON object")
    properties = message.get("properties")
    if not isinstance(properties, dict) or not _is_text(properties.get("delivery_tag")):
        raise UnreadableError("it has no delivery tag")
    where = properties.get("delivery_info")
    if not isinstance(where, Mapping) or not all(
        isinstance(where.get(name), str) for name in ("exchange", "routing_key")
    ):
        raise UnreadableError("it does not say where it was delivered to")
    if not isinstance(message.get("headers") or {}, dict):
        raise UnreadableError("its headers are no JSON object")
    kinds = (message.get("content-type"), message.get("content-encoding"))
    if not all(kind is None or isinstance(kind, str) for kind in kinds):
        raise UnreadableError("its content type is no text")
    _check_body(message.get("body"), properties.get("body_encoding"))
    return message


def quoted(value: object) -> str:
    """A name from the broker for a log: short, and without control characters."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return ascii(text[:_SHOWN])


def _check_body(body: Any, encoding: Any) -> None:
    if body is not None and not isinstance(body, str):
        raise UnreadableError("its body is no text")
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
        raise UnreadableError("it is no JSON") from None
