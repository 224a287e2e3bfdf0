"""Checks the messages of a chat, and gives them the form that chat templates expect."""

from __future__ import annotations

import json
from typing import Any

import orjson

from specbatch.pipeline.inputs.contract import RowError

ROLES = ("system", "user", "assistant", "tool", "developer")


def messages_of(prompt: Any) -> list[dict[str, Any]]:
    """The messages of a prompt, which is a list or its JSON. Raises `RowError`."""
    if isinstance(prompt, str):
        try:
            prompt = orjson.loads(prompt)
        except orjson.JSONDecodeError:
            raise RowError("bad_messages", "the messages are not JSON") from None
    if not isinstance(prompt, list) or not prompt:
        raise RowError("bad_messages", "messages must be a list that is not empty")
    return [_message(item, number) for number, item in enumerate(prompt)]


def _message(item: Any, number: int) -> dict[str, Any]:
    if not isinstance(item, dict) or "role" not in item:
        raise RowError("bad_messages", f"message {number} is not an object with role and content")
    if item["role"] not in ROLES:
        raise RowError(
            "unknown_role",
            f"message {number} has the role {item['role']!r:.50}; roles are {', '.join(ROLES)}",
        )
    rest = {key: value for key, value in item.items() if value is not None}
    calls = rest.get("tool_calls")
    if item["role"] == "assistant" and isinstance(calls, list) and calls:
        rest["tool_calls"] = [_call(call, number) for call in calls]
        if item.get("content") is None:  # templates tell by it that the message is only calls
            return rest | {"content": None}
    return rest | {"content": _content(item.get("content"), number)}


def _call(call: Any, number: int) -> dict[str, Any]:
    """A call in a message. Templates expect its arguments as values, OpenAI writes their JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("bad_messages", f"a tool call of message {number} has no function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            # Not by orjson, which rounds integers of more than 64 bits.
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            raise RowError(
                "bad_messages", f"the arguments of a tool call of message {number} are not JSON"
            ) from None
    return {**call, "function": function | {"arguments": arguments or {}}}


def _content(content: Any, number: int) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in content
        ]
        if all(isinstance(text, str) for text in texts):
            return "".join(text for text in texts if text)
    raise RowError("bad_messages", f"the content of message {number} is not text")
