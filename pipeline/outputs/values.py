"""Values of Arrow columns as Python, and so JSON, can have them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from specbatch.schemas.arrow import changed_within


def values_of(column: pa.Array) -> list[Any]:
    """The column's values; None for one that Python does not have, such as a day of the year 10000.

    Times have microseconds at most: Python has nanoseconds only where pandas is installed.
    """
    kind = changed_within(column.type, _in_microseconds)
    if kind != column.type:
        column = column.cast(options=pc.CastOptions(kind, allow_time_truncate=True))
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError):
        return [_value(cell) for cell in column]


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if pa.types.is_time64(kind):
        return pa.time64("us")
    return pa.duration("us") if pa.types.is_duration(kind) and kind.unit == "ns" else kind


def _value(cell: pa.Scalar) -> Any:
    try:
        return cell.as_py()
    except (ValueError, OverflowError):
        # Text that is no UTF-8, a time beyond Python's years, two equal names in a struct.
        return None
