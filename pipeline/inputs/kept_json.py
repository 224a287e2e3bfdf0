"""Columns of JSON values in Arrow: the types of the fields that a job keeps of JSONL rows.

Apart from the reader, because who only submits may have no pyarrow.
"""

from __future__ import annotations

from typing import Any

import orjson
import pyarrow as pa

from specbatch.schemas import arrow

_MOST_EXACT = 1 << 53  # integers beyond differ from their doubles
_TYPES = {
    frozenset({"bool"}): pa.bool_(),
    frozenset({"int"}): pa.int64(),
    frozenset({"float"}): pa.float64(),
    frozenset({"int", "float"}): pa.float64(),
    frozenset({"str"}): pa.string(),
    frozenset(): pa.string(),  # null in all rows
}


def kind_of(value: Any) -> str:
    """What a column of such values may be: `null`, `bool`, `int`, `float`, `str` or another."""
    if value is None:
        return "null"
    name = type(value).__name__
    if name == "int" and abs(value) > _MOST_EXACT:
        return "long" if -(2**63) <= value < 2**63 else "other"
    return name


def field_of(name: str, kinds: set[str]) -> pa.Field:
    said = frozenset(kinds - {"null"})
    if said <= {"int", "long"} and said:
        return pa.field(name, pa.int64())
    if (kind := _TYPES.get(said)) is not None:
        return pa.field(name, kind)
    return pa.field(name, pa.string(), metadata=arrow.JSON_TEXT)


def column_of(values: list[Any], field: pa.Field) -> pa.Array:
    """The column of a field that rows have. A value that is nested too deep to be written is null:
    orjson writes 254 levels, and reads 1,024."""
    if field.metadata:
        values = [None if value is None else _text(value) for value in values]
    return pa.array(values, field.type)


def _text(value: Any) -> str | None:
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return None
