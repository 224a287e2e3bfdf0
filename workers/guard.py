"""Which messages a worker accepts: anybody who can write to the broker can write anything.

A message is refused, unparsed if it is too large, unless it is exactly what we send: one of our two
tasks, its fields and no others, now, once, and nothing chained behind it. (Celery would publish
what a body chains or links, and hold back what is for later.) An accepted message claims nothing by
itself: the store may well have nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from kombu.message import Message
from pydantic import BaseModel, ValidationError

from specbatch.schemas.messages import (
    MAX_REFILL_BYTES,
    MAX_WORK_BYTES,
    RefillMessage,
    WorkMessage,
)

WORK_TASK = "specbatch.work"
REFILL_TASK = "specbatch.refill"
MOST_CHARACTERS = 300  # of a client library's error, in a log

_KINDS: Mapping[str, tuple[type[BaseModel], int]] = {
    WORK_TASK: (WorkMessage, MAX_WORK_BYTES),
    REFILL_TASK: (RefillMessage, MAX_REFILL_BYTES),
}
_UNSET_HEADERS = ("eta", "shadow", "group", "group_index", "stamps", "stamped_headers", "retries")
_TEXT_HEADERS = ("id", "expires", "root_id", "parent_id", "argsrepr", "kwargsrepr", "origin")
_MOST_TEXT = 4096  # characters of a header; Celery cuts its own at 1,024
_CHAINED = {"callbacks", "errbacks", "chain", "chord"}


class RefusedMessageError(ValueError):
    """A message that is not ours; the text says what is wrong with it, and quotes nothing of it."""


def check(message: Message) -> None:
    """Raise `RefusedMessageError` unless a worker of ours may take this."""
    headers = message.headers
    name = headers.get("task") if isinstance(headers, Mapping) else None
    if not isinstance(name, str) or name not in _KINDS:
        raise RefusedMessageError("it names no task of this program")
    _check_headers(headers)
    model, most = _KINDS[name]
    body = parsed(message, most)
    if not (isinstance(body, list | tuple) and len(body) == 3):
        raise RefusedMessageError("its body is not Celery's [args, kwargs, embed]")
    args, kwargs, embed = body
    if args or not isinstance(kwargs, Mapping):
        raise RefusedMessageError("it has positional arguments")
    if embed and not (
        isinstance(embed, Mapping) and set(embed) <= _CHAINED and not any(embed.values())
    ):
        raise RefusedMessageError("it carries a chain, group or chord")
    try:
        model.model_validate(dict(kwargs))
    except ValidationError as error:
        raise RefusedMessageError(wrong_fields(error)) from None


def parsed(message: Message, most_bytes: int) -> Any:
    """The body, if it is JSON of at most so many bytes. Raises `RefusedMessageError`."""
    headers = message.headers
    if isinstance(headers, Mapping) and headers.get("compression"):
        raise RefusedMessageError("it is compressed")  # small here is no promise of small later
    size = len(message.body) if isinstance(message.body, Sized) else 0
    if size > most_bytes:
        raise RefusedMessageError(f"it has {size} bytes, where {most_bytes} are the most")
    try:
        return message.decode()
    except Exception as error:  # of the serializer, of the character set, of what is allowed
        raise RefusedMessageError(f"it cannot be read ({type(error).__name__})") from None


def wrong_fields(error: ValidationError) -> str:
    """Names of the fields, not their values, which anybody may have written."""
    names = {".".join(str(part)[:40] for part in item["loc"][:3]) for item in error.errors()}
    return f"wrong fields: {', '.join(sorted(names)[:5]) or 'all'}"


def _check_headers(headers: Mapping[str, Any]) -> None:
    limits = headers.get("timelimit")
    for name in _UNSET_HEADERS:
        if headers.get(name):
            raise RefusedMessageError(f"its header `{name}` is set")
    if limits and (not isinstance(limits, list | tuple) or any(limits)):
        raise RefusedMessageError("its header `timelimit` is set")
    for name in _TEXT_HEADERS:
        text = headers.get(name)
        if text is not None and (not isinstance(text, str) or len(text) > _MOST_TEXT):
            raise RefusedMessageError(f"its header `{name}` is not a short text")
