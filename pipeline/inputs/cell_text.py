"""The text of a cell in a prompt.

Numbers and truth values are written as JSON writes them, dates and times as ISO 8601 does, lists
and structs as JSON. Apart from what uses it, so that a process that renders starts quickly.
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
    return value is None or (isinstance(value, float) and math.isnan(value))


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
        return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS)
    except (TypeError, RecursionError):  # orjson reads deeper values than it writes
        raise RowError(*_NESTED) from None


def _plain(value: Any) -> str:
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)
