"""Columns of an input that a job carries into its output (`output.keep_columns`).

They are read when the output is written, from the files that the job has read: an input that
changed meanwhile is refused. One batch is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from specbatch.pipeline.inputs.contract import Source
from specbatch.pipeline.storage.object_store import ObjectInfo
from specbatch.schemas import arrow
from specbatch.schemas.errors import InputError
from specbatch.schemas.spec import KeptColumns

ALL = "all"


def kept_schema(source: Source, wanted: KeptColumns, own: pa.Schema = arrow.OUTPUT) -> pa.Schema:
    """The columns to keep, with their types. Raises `InputError` for one that there is not, or
    that the output has itself (`own`), and `ObjectError`."""
    schema = source.kept_schema(None if wanted == ALL else wanted)
    for name in schema.names:
        if name in own.names:
            raise InputError(
                f"column `{name}` of the input cannot be kept, because the output has one of that "
                "name; rename it, or name other columns in output.keep_columns"
            )
    return schema


def kept_names(there: Sequence[str], wanted: Sequence[str] | None, row_id: str | None) -> list[str]:
    """The names of the columns to keep, for all of `there` if none are wanted.

    Of all columns a row's `id` is left out: the output has it.
    """
    if wanted is not None:
        return list(wanted)
    return [name for name in there if not name == row_id == "id"]


def common_schema(
    found: Iterable[tuple[ObjectInfo, pa.Schema]], wanted: Sequence[str] | None, row_id: str | None
) -> pa.Schema:
    """The columns to keep of files whose columns are these. Raises `InputError` where a file lacks
    one, or two files differ."""
    first: tuple[ObjectInfo, pa.Schema] | None = None
    for info, schema in found:
        names = kept_names(schema.names, wanted, row_id)
        check_there(info.uri, schema.names, names)
        kept = _fields(schema, names)
        first = first or (info, kept)
        if not kept.equals(first[1]):
            raise InputError(_unlike(*first, info, kept))
    assert first is not None, "an input has files"
    return first[1]


def check_there(uri: str, there: Sequence[str], names: Sequence[str]) -> None:
    """Raise `InputError` unless a file has each of these columns once."""
    for name in names:
        if name not in there:
            raise InputError(f"{uri} has no column `{name}`; its columns are {', '.join(there)}")
        if there.count(name) > 1:
            raise InputError(f"{uri} has several columns `{name}`; rename all but one")


def _fields(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    """These columns with their types; any may be null in the output."""
    fields = (schema.field(name) for name in names)
    return pa.schema([pa.field(field.name, field.type) for field in fields])


def _unlike(first: ObjectInfo, one: pa.Schema, second: ObjectInfo, other: pa.Schema) -> str:
    """Says how the columns of two files differ."""
    if one.names != other.names:
        how = f"{', '.join(one.names)} in {first.uri}, and {', '.join(other.names)} in {second.uri}"
        return f"output.keep_columns cannot keep all: columns are {how}; name those to keep"
    name = next(n for n in one.names if one.field(n).type != other.field(n).type)
    types = f"{one.field(name).type} in {first.uri}, and {other.field(name).type} in {second.uri}"
    return f"column `{name}` cannot be kept: it is {types}; make them the same, or leave it out"
