"""What types of Arrow columns are."""

from __future__ import annotations

import pyarrow as pa


def is_text(kind: pa.DataType) -> bool:
    """Strings and binaries of every layout."""
    is_of = pa.types
    return bool(
        is_of.is_string(kind) or is_of.is_large_string(kind) or is_of.is_string_view(kind)
        or is_of.is_binary(kind) or is_of.is_large_binary(kind) or is_of.is_binary_view(kind)
    )  # fmt: skip


def plainly(kind: pa.DataType) -> pa.DataType:
    """The type for the same values without a view, which Arrow cannot pick rows of."""
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    return kind


def is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
