"""The finished rows of a job in a Delta or Iceberg table: one commit, made once.

The rows are those of the parts whose completions ended well, in the columns of the parts, and the
job's id in the column `job`. They are committed when all parts are in place and the manifest is
not, so the manifest names the table's snapshot.

A commit carries the job's id and a digest of the parts. A publication that is done again finds
them and commits nothing; one with other parts, as after a retry or a review, replaces the job's
rows. What a killed process has written without a commit no reader sees.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from specbatch.pipeline.outputs.outputs import check_writable
from specbatch.pipeline.storage import delta, iceberg
from specbatch.pipeline.storage.objects import Objects, join, local_path, tidy
from specbatch.pipeline.storage.tables import Commit
from specbatch.schemas.audit import DATA_FOLDER
from specbatch.schemas.errors import (
    MissingExtraError,
    ObjectError,
    OutputError,
    UsageError,
)
from specbatch.schemas.exports import WrittenFile
from specbatch.schemas.records import FINISHED
from specbatch.schemas.table_spec import DELTA, JOB_COLUMN, TableSpec, words_of

_BATCH_ROWS = 4096
_MOST_TRIES = 5  # while others commit to the same table
_FINISHED = pa.array([reason.value for reason in FINISHED])


@dataclass(frozen=True, slots=True)
class Committed:
    """`snapshot`: None where a job had no finished rows."""

    rows: int
    snapshot: int | None


# --- columns ------------------------------------------------------------------------------------
def table_schema(columns: pa.Schema) -> pa.Schema:
    """The columns of a table that is made for these of an output: any may be null, in types that
    both kinds of table have."""
    if JOB_COLUMN in columns.names:
        raise OutputError(
            f"column `{JOB_COLUMN}` of the input cannot be kept, because output.table has one of "
            "that name; rename it, or name other columns in output.keep_columns"
        )
    return pa.schema([*map(_table_field, columns), pa.field(JOB_COLUMN, pa.string())])


def _table_field(field: pa.Field) -> pa.Field:
    try:
        return pa.field(field.name, table_type(field.type))
    except ValueError:
        raise OutputError(
            f"column `{field.name}` is {field.type}, which a table cannot hold: leave it out of "
            "output.keep_columns, or change its type"
        ) from None


def table_type(kind: pa.DataType) -> pa.DataType:
    """The type of a table for one of Arrow; what has no other stays. Raises `ValueError`."""
    types = pa.types
    if types.is_uint64(kind) or types.is_null(kind):
        raise ValueError(f"no table has {kind}")
    if types.is_dictionary(kind):
        return table_type(kind.value_type)
    if types.is_struct(kind):
        return pa.struct([pa.field(field.name, table_type(field.type)) for field in kind])
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(pa.field("element", table_type(kind.value_type)))
    if types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if types.is_large_binary(kind) or types.is_binary_view(kind):
        return pa.binary()
    if types.is_fixed_size_binary(kind):
        return pa.binary()
    if types.is_float16(kind):
        return pa.float32()
    if kind in (pa.int8(), pa.int16(), pa.uint8(), pa.uint16()):
        return pa.int32()
    if types.is_date64(kind):
        return pa.date32()
    return pa.int64() if kind == pa.uint32() else kind


def _check(spec: TableSpec, there: pa.Schema, wanted: pa.Schema, required: Sequence[str]) -> None:
    """Raise `OutputError` unless the table can take rows with the wanted columns."""
    name = f"{words_of(spec.kind)[0]} {spec.uri}"
    for field in wanted:
        if field.name not in there.names:
            raise OutputError(
                f"{name} has no column `{field.name}`: add it as {field.type}, or name another "
                "table in output.table"
            )
        kind = there.field(field.name).type
        if table_type(kind) != field.type:
            raise OutputError(
                f"column `{field.name}` of {name} is {kind}, and the output's is {field.type}: "
                "name another table in output.table"
            )
    if others := [column for column in required if column not in wanted.names]:
        raise OutputError(
            f"column `{others[0]}` of {name} must not be null, and the output has none: name "
            "another table in output.table"
        )


def _check_named(spec: TableSpec, wanted: pa.Schema) -> None:
    named = {"key": spec.key if spec.mode == "merge" else (), "partition_by": spec.partition_by}
    for what, columns in named.items():
        for column in columns:
            if column not in wanted.names:
                raise OutputError(
                    f"output.table.{what} names column `{column}`, which the output does not have; "
                    f"it has {', '.join(wanted.names)}"
                )
            if pa.types.is_nested(kind := wanted.field(column).type):
                raise OutputError(
                    f"output.table.{what} names column `{column}`, which is {kind}: name columns "
                    "of text, numbers or times"
                )


def _nullable_no(schema: pa.Schema) -> list[str]:
    return [field.name for field in schema if not field.nullable]


# --- before the job -----------------------------------------------------------------------------
def check_apart(spec: TableSpec, output_uri: str) -> None:
    """Raise `OutputError` where the output would lie in the table, whose vacuum deletes every file
    that it does not know, or the table among the output's parts, whose readers would read it."""
    table, output = join(tidy(spec.uri), ""), join(tidy(output_uri), "")
    if spec.kind == DELTA and (
        output.startswith(table) or table.startswith(join(output, f"{DATA_FOLDER}/"))
    ):
        raise OutputError(
            f"output {output_uri} and Delta table {spec.uri} would lie in one another: choose "
            "another location for one of them"
        )


def prepare(spec: TableSpec, objects: Objects, columns: pa.Schema, makes: bool) -> Any:
    """The table, if it is there or `makes`; checked for an output with these columns.

    Raises `OutputError`, `MissingExtraError` and `ObjectError`.
    """
    wanted = table_schema(columns)
    _check_named(spec, wanted)
    try:
        table = _open(spec, objects, wanted, makes)
    except MissingExtraError:
        raise
    except UsageError as error:
        raise OutputError(f"output.table: {error}") from error
    if table is not None:
        there = _schema_of(spec, table)
        _check(spec, there, wanted, _nullable_no(there))
    return table


def _open(spec: TableSpec, objects: Objects, wanted: pa.Schema, makes: bool) -> Any:
    if spec.kind == DELTA:
        if makes:
            return delta.create(spec.uri, objects, wanted, spec.partition_by)
        return _delta_if_there(spec.uri, objects, wanted)
    if makes:
        return iceberg.create(spec.uri, wanted, spec.partition_by)
    return iceberg.table_if_there(spec.uri)


def _delta_if_there(uri: str, objects: Objects, wanted: pa.Schema) -> Any:
    if delta.has_table(uri, objects):
        return delta.delta_table(uri, objects)
    delta.check_schema(uri, wanted)
    if "://" not in uri:
        check_writable(Path(uri))
        if any(local_path(uri).glob("*")):
            raise OutputError(f"{uri} holds files, and no Delta table: name another folder")
    return None


def _schema_of(spec: TableSpec, table: Any) -> pa.Schema:
    if spec.kind == DELTA:
        return delta.arrow_schema(table)
    return table.schema().as_arrow()


# --- the commit ---------------------------------------------------------------------------------
def commit_rows(
    spec: TableSpec,
    objects: Objects,
    job_id: str,
    output_uri: str,
    parts: Sequence[WrittenFile],
    still_mine: Callable[[], None] = lambda: None,
) -> Committed:
    """Commit the finished rows of published parts, unless the table has them.

    `still_mine` is called before each try; it raises if another worker publishes the job by now.
    Raises `OutputError` and `ObjectError`.
    """
    rows = _Rows(spec, objects, job_id, output_uri, parts)
    commit = Commit(job_id, _digest(parts))
    for tries_left in reversed(range(_MOST_TRIES)):
        still_mine()
        try:
            return _try(spec, objects, commit, rows)
        except ObjectError as error:
            if not error.passing or not tries_left:
                raise
    raise AssertionError("the last try returns or raises")


def _try(spec: TableSpec, objects: Objects, commit: Commit, rows: _Rows) -> Committed:
    table = prepare(spec, objects, rows.columns, makes=True)
    kind = delta if spec.kind == DELTA else iceberg
    is_known, snapshot = kind.committed(table, commit)
    count = rows.count()
    if snapshot is not None or (not is_known and not count):
        return Committed(count, snapshot)
    is_merge = spec.mode == "merge"
    there = _schema_of(spec, table)
    target = pa.schema([there.field(name) for name in rows.wanted.names]) if is_merge else there
    target = target.remove_metadata()
    if is_merge:
        rows.check_key(target)
    if spec.kind == DELTA:
        batches = (target, lambda: rows.batches(target))
        if is_merge:
            made = delta.merge(spec.uri, table, commit, *batches, is_known, spec.key)
            return Committed(count, made)
        return Committed(count, delta.append(spec.uri, table, commit, *batches, is_known))
    key = spec.key if is_merge else ()
    made = iceberg.write(spec.uri, table, commit, lambda: rows.tables(target), is_known, key)
    return Committed(count, made)


def _digest(parts: Sequence[WrittenFile]) -> str:
    said = "".join(f"{part.name}\0{part.sha256}\0" for part in parts)
    return hashlib.sha256(said.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Rows:
    """The finished rows of published parts, read from there as often as they are needed."""

    spec: TableSpec
    objects: Objects
    job_id: str
    output_uri: str
    parts: Sequence[WrittenFile]

    @property
    def columns(self) -> pa.Schema:
        return next(self._files()).schema_arrow.remove_metadata()

    @property
    def wanted(self) -> pa.Schema:
        return table_schema(self.columns)

    def count(self) -> int:
        return sum(batch.num_rows for batch in self._finished(["finish_reason"]))

    def batches(self, target: pa.Schema) -> Iterator[pa.RecordBatch]:
        """In the columns of the table, in bounded memory."""
        for batch in self._finished(None):
            yield from self._as(target, batch).to_batches()

    def tables(self, target: pa.Schema) -> Iterator[pa.Table]:
        """The same, a part at a time; one without rows if there are none."""
        made = False
        for number in range(len(self.parts)):
            found = [self._as(target, b) for b in self._finished(None, number)]
            if found:
                made = True
                yield pa.concat_tables(found)
        if not made:
            yield target.empty_table()

    def check_key(self, target: pa.Schema) -> None:
        """Raise `OutputError` where two rows have one key as the table has it, or a row has none.
        Times that differ may be one in the table."""
        key = list(self.spec.key)
        stored = [name for name in key if name != JOB_COLUMN]
        kinds = pa.schema([(name, target.field(name).type) for name in stored])
        batches = self._finished(list(dict.fromkeys([*stored, "finish_reason"])))
        found = pa.concat_tables([kinds.empty_table(), *(self._as(kinds, b) for b in batches)])
        for name in stored:
            if found.column(name).null_count:
                raise OutputError(
                    f"a row has null in `{name}` of output.table.key: leave that column out of the "
                    "key, or fill it"
                )
        if found.group_by(stored).aggregate([]).num_rows < found.num_rows:
            raise OutputError(
                f"two rows have the same {', '.join(key)}, which is output.table.key: add a column "
                "that tells them apart"
            )

    def _as(self, target: pa.Schema, batch: pa.RecordBatch) -> pa.Table:
        columns = []
        for field in target:
            if field.name == JOB_COLUMN:
                column = pa.repeat(pa.scalar(self.job_id), batch.num_rows)
            elif field.name in batch.schema.names:
                column = _as_table_has_it(batch.column(field.name), field.type)
            else:
                column = pa.nulls(batch.num_rows, field.type)
            columns.append(column)
        return pa.Table.from_arrays(columns, names=target.names).cast(target)

    def _finished(
        self, columns: list[str] | None, part: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        for file in self._files(part):
            for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
                is_finished = pc.is_in(batch.column("finish_reason"), value_set=_FINISHED)
                if (kept := batch.filter(is_finished)).num_rows:
                    yield kept

    def _files(self, part: int | None = None) -> Iterator[pq.ParquetFile]:
        for one in self.parts if part is None else [self.parts[part]]:
            uri = join(self.output_uri, one.name)
            with self.objects.open(uri) as file:
                yield pq.ParquetFile(file)


def _as_table_has_it(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """The column in the table's type. Times lose what is finer than microseconds."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.type == kind:
        return column
    return column.cast(options=pc.CastOptions(kind, allow_time_truncate=True))
