"""Frames in and out: pandas and polars DataFrames and pyarrow Tables, whose libraries are imported
only if one of them comes in.

A job reads a Parquet file of a frame's columns. What it wrote is joined to the frame itself, by the
number of the row, so that columns, their types, the order of rows and an index stay what they were.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from specbatch.pipeline.inputs.prompt_template import check_columns, columns_of
from specbatch.schemas.errors import InputError, MissingExtraError
from specbatch.schemas.spec import InputSpec, JobSpec

if TYPE_CHECKING:
    import pyarrow as pa


class FrameLike(Protocol):
    """A pandas or polars DataFrame, or a pyarrow Table."""

    @property
    def columns(self) -> Any: ...


Frame = TypeVar("Frame", bound=FrameLike)

LIBRARIES = {("pandas", "DataFrame"), ("polars", "DataFrame"), ("pyarrow", "Table")}
NOT_ADDED = ("id", "row_index")  # of an output's columns: the frame has its own
PREFIX = "completion_"  # of an output's column whose name the frame has already
_ACCEPTED = "a pandas or polars DataFrame, a pyarrow Table, or a path"


def library_of(data: object) -> str | None:
    """The library that a frame is of; None for a path. Raises `InputError` for anything else."""
    if isinstance(data, str | os.PathLike):
        return None
    names = [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(data).__mro__]
    for library, name in names:
        if (library, name) in LIBRARIES:
            return library
    if ("polars", "LazyFrame") in names:
        raise InputError("data is a polars LazyFrame: give what its `collect()` returns")
    raise InputError(f"data is of type {type(data).__name__}: give {_ACCEPTED}")


def check_frame(frame: Any, spec: InputSpec) -> None:
    """Raise `InputError` for a frame without rows or without a column that the spec names."""
    names = _names_of(frame)
    check_columns(spec, "data", map(str, names))
    wanted = (spec.read_prompt_column, spec.id_column, spec.seed_column, spec.tag_column)
    for column in (*wanted, spec.sampling_column, *columns_of(spec)):
        if column is not None and column not in names:
            shown = ", ".join(map(str, names))
            raise InputError(f"data has no column `{column}`; its columns are {shown}")
        if names.count(column) > 1:
            raise InputError(f"data has {names.count(column)} columns `{column}`: rename them")
    if not _rows_of(frame):
        raise InputError("data has no rows: there is nothing to generate")


def check_kept(frame: Any, spec: JobSpec) -> None:
    """Raise `InputError` for a column that an output cannot keep, as it has one of that name."""
    kept: Sequence[Any] = spec.output.keep_columns
    if kept == "all":
        has_id = spec.input.id_column in (None, "id")  # then an output has the same
        kept = [name for name in _names_of(frame) if not (name == "id" and has_id)]
    for name in kept and _output_names(spec.output.best_by is not None):
        if name in kept:
            raise InputError(
                f"column `{name}` of the data cannot be kept, because the output has one of that "
                "name; rename it, or name other columns in keep_columns"
            )


def columns_for(frame: Any, spec: InputSpec) -> list[str]:
    """The columns that a job reads: those that the spec names, and `id` and `tag`."""
    named = (
        *(spec.read_prompt_column, spec.id_column or "id", spec.tag_column or "tag"),
        *(spec.seed_column, spec.sampling_column, *columns_of(spec)),
    )
    there = _names_of(frame)
    return [name for name in dict.fromkeys(named) if name is not None and name in there]


def parquet_of(frame: Any, library: str, columns: Sequence[str] | None) -> bytes:
    """These columns, or all, as a Parquet file. Raises `InputError` for what Parquet cannot hold.

    The same frame has the same bytes.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingExtraError(
            "frames go through Parquet files, and pyarrow is not installed here: "
            "`pip install 'specbatch[engine]'`"
        ) from None
    chosen = list(columns) if columns is not None else _names_of(frame)
    if odd := [name for name in chosen if not isinstance(name, str)]:
        raise InputError(f"column name {odd[0]!r} of the data is not text: rename the column")
    try:
        table = _table_of(frame, library, chosen).replace_schema_metadata(None)
        file = io.BytesIO()
        pq.write_table(table, file)
    except (pa.ArrowException, TypeError, ValueError) as error:
        said = " ".join("; ".join(map(str, error.args)).split())
        raise InputError(
            f"the data cannot be written as Parquet ({said:.300}): give each column values of one "
            "type"
        ) from None
    return file.getvalue()


def with_completions(
    frame: Any, library: str, completions: pa.Table, unfinished: str, scored: bool = False
) -> Any:
    """A new frame: each of the frame's rows as often as it has completions, with their columns.

    `completions` are an output's rows in input order, `scored` where its job had `best_by`. A row
    that has none, because its job was stopped, comes once with `unfinished` as its error.
    """
    import numpy as np

    table = _with_lost_rows(completions, _rows_of(frame), unfinished)
    positions = table.column("row_index").to_numpy()
    taken = set(_names_of(frame))
    added = table.select([name for name in _output_names(scored) if name not in NOT_ADDED])
    added = added.rename_columns([_free_name(name, taken) for name in added.column_names])
    same = len(positions) == _rows_of(frame) and bool(
        np.array_equal(positions, np.arange(len(positions)))
    )
    return _JOINED[library](frame, None if same else positions, added)


def _output_names(scored: bool) -> list[str]:
    from specbatch.schemas import arrow

    return list(arrow.output_schema(scored).names)


def _free_name(name: str, taken: set[Any]) -> str:
    while name in taken:
        name = PREFIX + name
    return name


def _with_lost_rows(completions: pa.Table, rows: int, unfinished: str) -> pa.Table:
    import numpy as np
    import pyarrow as pa

    lost = np.setdiff1d(np.arange(rows), completions.column("row_index").to_numpy())
    if not len(lost):
        return completions
    known = {
        "row_index": lost,
        "sample_index": [0] * len(lost),
        "finish_reason": ["cancelled"] * len(lost),
        "error": [unfinished] * len(lost),
    }
    columns = [
        pa.array(known[field.name], field.type)
        if field.name in known
        else pa.nulls(len(lost), field.type)
        for field in completions.schema
    ]
    nullable = [field.with_nullable(True) for field in completions.schema]
    schema = pa.schema(nullable)
    both = [completions.cast(schema), pa.Table.from_arrays(columns, schema=schema)]
    return pa.concat_tables(both).sort_by(
        [("row_index", "ascending"), ("sample_index", "ascending")]
    )


# --- what each library does in its own way ----------------------------------------------------


def _names_of(frame: Any) -> list[Any]:
    return list(frame.column_names if library_of(frame) == "pyarrow" else frame.columns)


def _rows_of(frame: Any) -> int:
    return int(frame.shape[0])


def _table_of(frame: Any, library: str, columns: list[str]) -> pa.Table:
    import pyarrow as pa

    if library == "pandas":
        return pa.Table.from_pandas(frame[columns], preserve_index=False)
    if library == "polars":
        import polars as pl

        return frame.select(columns).to_arrow(compat_level=pl.CompatLevel.oldest())
    return frame.select(columns)


def _in_pandas(frame: Any, positions: Any, added: pa.Table) -> Any:
    import pandas as pd
    import pyarrow as pa

    whole = {pa.int32(): pd.Int32Dtype(), pa.int64(): pd.Int64Dtype()}  # also where some are null
    columns = added.to_pandas(types_mapper=whole.get)
    rows = frame if positions is None else frame.iloc[positions]
    joined = pd.concat([rows.reset_index(drop=True), columns], axis=1)
    joined.index = rows.index
    return joined


def _in_polars(frame: Any, positions: Any, added: pa.Table) -> Any:
    import polars as pl

    rows = frame if positions is None else frame[positions]
    return rows.hstack(pl.DataFrame(pl.from_arrow(added)).get_columns())


def _in_pyarrow(frame: pa.Table, positions: Any, added: pa.Table) -> pa.Table:
    joined = frame if positions is None else frame.take(positions)
    for field, column in zip(added.schema, added.columns, strict=True):
        joined = joined.append_column(field, column)
    return joined


_JOINED = {"pandas": _in_pandas, "polars": _in_polars, "pyarrow": _in_pyarrow}
