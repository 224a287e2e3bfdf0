"""The form that an output must have, as a job, a row or an OpenAI body asks for it.

{"type": "text"}                                 anything
{"type": "json_object"}                          any JSON object
{"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}, or "schema" without the rest
{"type": "regex", "regex": …}                    a text that the pattern matches as a whole
{"type": "choice", "choice": […]}                one of some texts
{"type": "lark", "lark": …}                      a grammar in Lark's notation
"""

from __future__ import annotations

from typing import Any

import orjson

from specbatch.schemas.tools import TOOLS

_MOST_BYTES = 262_144
_FIELDS = {"json_object": (), "json_schema": ("schema",), "regex": ("regex",)} | {
    "choice": ("choice",),
    "lark": ("lark",),
}


def canonical(given: object) -> str:
    """One JSON text per form; empty for free text. It is its own canonical form.

    The order of a schema's properties is kept: outputs have it. Raises `ValueError`.
    """
    if isinstance(given, str):
        given = _parsed(given)
    if isinstance(given, dict):  # a column of structs has the keys of all rows, with nulls
        given = {key: value for key, value in given.items() if value is not None}
    if given is None or given == {"type": "text"}:
        return ""
    if not isinstance(given, dict) or not isinstance(given.get("type"), str):
        raise ValueError('should be an object with a "type", such as {"type": "json_object"}')
    kind = given["type"]
    if kind not in _FIELDS:
        raise ValueError(f"has type {kind!r:.40}: it is one of text, {', '.join(_FIELDS)}")
    value = _value(kind, given)
    form = {"type": kind} | ({} if value is None else {_FIELDS[kind][0]: value})
    try:
        text = orjson.dumps(form)
    except TypeError as error:  # also too deep, or a number of more than 64 bits
        raise ValueError(f"cannot be written as JSON: {str(error).lower()}") from None
    if len(text) > _MOST_BYTES:
        raise ValueError(f"has {len(text):,} bytes, more than {_MOST_BYTES:,}")
    return text.decode()


def parsed(text: str) -> tuple[str, Any]:
    """(type, its value) of a canonical form that is not empty, also of one that `tools.form_of`
    made; None for `json_object`."""
    found = orjson.loads(text)
    kind = found["type"]
    return kind, None if kind == "json_object" else found[
        kind if kind == TOOLS else _FIELDS[kind][0]
    ]


def _parsed(text: str) -> object:
    try:
        return orjson.loads(text) if text.strip() else None
    except orjson.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from None


def _value(kind: str, given: dict[str, Any]) -> Any:
    if kind == "json_object":
        return None
    if kind == "json_schema":
        schema = given["schema"] if "schema" in given else _in_openai_form(given)
        if not isinstance(schema, dict | bool):
            raise ValueError("needs a JSON schema, which is an object")
        return schema
    value = given.get(kind)
    if kind == "choice":
        if not (isinstance(value, list | tuple) and value and all(_is_text(v) for v in value)):
            raise ValueError("needs a list of texts as its choice, none of them empty")
        return list(value)
    if not _is_text(value):
        raise ValueError(f'needs a text under "{kind}"')
    return value


def _in_openai_form(given: dict[str, Any]) -> Any:
    inner = given.get("json_schema")
    return inner.get("schema") if isinstance(inner, dict) else None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)
