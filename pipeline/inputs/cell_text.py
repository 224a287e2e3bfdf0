"""The text of a cell in a prompt.

Numbers and truth values are written as JSON writes them, dates and times as ISO 8601 does, lists
and structs as JSON. JSON has no infinity, so such a cell has no value. Apart from what uses it, so
that a process that renders starts quickly.
"""

from __future__ import annotations

import base64
import math
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

import orjson

from specbatch.pipeline.inputs.contract import RowError

_NESTED = ("wrong_type", "a value that the template names is nested too deeply")


def is_missing(value: Any) -> bool:
    """Whether a cell has no value. Not-a-number is how many tools write that."""
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def cell_text(value: Any) -> str:
    """The text of a value that is not missing. Raises `RowError`."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list | tuple):
        return cell_json(value).decode()
    return _plain(value)


def cell_json(value: Any) -> bytes:
    """The value as JSON. Raises `RowError`."""
    try:
        return orjson.dumps(value, default=_of_json, option=orjson.OPT_NON_STR_KEYS)
    except (TypeError, RecursionError):  # orjson reads deeper values than it writes
        raise RowError(*_NESTED) from None


def _of_json(value: Any) -> Any:
    """What orjson writes of a value that it does not know. A decimal number keeps its digits."""
    if isinstance(value, Decimal | float):  # a kind of float that knows its own text
        return orjson.Fragment(_plain(value))
    return _plain(value)


def _plain(value: Any) -> str:
    if type(value) is float:
        return orjson.dumps(value).decode()
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)
