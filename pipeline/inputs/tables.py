"""Delta and Iceberg tables as inputs: the Parquet files of one snapshot, in the order of their
names.

Which snapshot that is, the submission pins: so the same rows are read however often a job is
resumed. With `input.since` they are the files that were added after another snapshot, and not
those that compaction wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from specbatch.pipeline.storage import delta, iceberg
from specbatch.pipeline.storage.object_store import ObjectInfo
from specbatch.pipeline.storage.objects import Objects, join, tidy
from specbatch.pipeline.storage.tables import DataFile
from specbatch.schemas.errors import InputError
from specbatch.schemas.spec import InputSpec
from specbatch.schemas.table_spec import DELTA, ICEBERG, LAST, Snapshot, TableKind, words_of

if TYPE_CHECKING:
    import pyarrow as pa

    from specbatch.pipeline.inputs.columnar import FileFacts


@dataclass(frozen=True, slots=True)
class TableFiles:
    """The files of a snapshot. It is the layout of the readers (`columnar.py`)."""

    files: list[ObjectInfo]
    schema: pa.Schema
    values: Mapping[str, Mapping[str, Any]]  # by file and column: what the file may lack

    def filled(self, uri: str, facts: FileFacts) -> FileFacts:
        """The table's columns. One that the file lacks has the file's partition value, or is null:
        it was added later."""
        import pyarrow as pa

        there, values = facts.schema.names, self.values.get(uri, {})
        lacks = [field for field in self.schema if field.name not in there]
        has = [facts.schema.field(f.name) if f.name in there else f for f in self.schema]
        constants = {field.name: constant(uri, field, values.get(field.name)) for field in lacks}
        return replace(facts, schema=pa.schema(has), constants=constants)


def typed(value: Any, kind: pa.DataType) -> pa.Scalar:
    """A partition value, which may be text, in the type of its column."""
    import pyarrow as pa

    if not isinstance(value, str):
        return pa.array([value], kind)[0]
    text = pa.array([value])
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return _moment(text, kind)[0]
    return text.cast(kind)[0]


def _moment(text: pa.Array, kind: pa.TimestampType) -> pa.Array:
    """Times with a zone; those that name none are of UTC."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        return text.cast(kind)
    except pa.ArrowInvalid:
        return pc.assume_timezone(text.cast(pa.timestamp(kind.unit)), "UTC").cast(kind)


def constant(uri: str, field: pa.Field, value: Any) -> pa.Scalar:
    """A file's partition value. Raises `InputError`."""
    import pyarrow as pa

    try:
        return typed(value, field.type)
    except pa.ArrowException as error:
        raise InputError(
            f"partition value {value!r} of column `{field.name}`, which the table has for {uri}, "
            f"cannot be read as {field.type}: copy the table into a new one"
        ) from error


def can_read_tables(spec: InputSpec) -> bool:
    """Whether the library of the input's table is installed."""
    module = "deltalake" if spec.table == DELTA else "pyiceberg"
    return find_spec(module) is not None and find_spec("pyarrow") is not None


def pin(
    spec: InputSpec, objects: Objects, earlier: Callable[[], Snapshot | None] = lambda: None
) -> Snapshot:
    """What a job submitted now reads. `earlier`: what the last job of its name has read.

    Raises `InputError`, `MissingExtraError` and `ObjectError`.
    """
    since = earlier() if spec.since == LAST else None
    number, table_id = _found(spec, objects)
    if since is None:
        return Snapshot(number, spec.since if isinstance(spec.since, int) else None, table_id)
    if not since.is_of(table_id) and not _is_since_in(spec, objects, since):
        raise InputError(
            f"{words_of(spec.table or DELTA)[0]} {spec.uri} was made again since the last job of "
            "this name has read it, so what was added since is not known: leave since out for one "
            "night"
        )
    return Snapshot(number, since.number, table_id)


def _found(spec: InputSpec, objects: Objects) -> tuple[int, str]:
    """The snapshot that is asked for, or the newest, and the id of its table."""
    if spec.table == DELTA:
        table = delta.delta_table(spec.uri, objects, spec.snapshot)
        return int(table.version()), delta.id_of(table)
    of_iceberg = iceberg.iceberg_table(spec.uri)
    number = spec.snapshot
    if number is None:
        number = iceberg.newest_snapshot(spec.uri, of_iceberg)
    return number, iceberg.id_of(of_iceberg)


def _is_since_in(spec: InputSpec, objects: Objects, since: Snapshot) -> bool:
    """Whether the table has the snapshot that was read before, though its id is another one now.

    Delta's merges with new columns give a table another id, and its log stays.
    """
    if spec.table != DELTA:
        return False
    try:
        return since.is_of(delta.id_of(delta.delta_table(spec.uri, objects, since.number)))
    except InputError:
        return False  # that version is gone


def _check_same(uri: str, kind: TableKind, snapshot: Snapshot, table_id: str) -> None:
    """Raise `InputError` where another table of this name has taken the place of the pinned one."""
    if not snapshot.is_of(table_id):
        table, word = words_of(kind)
        raise InputError(
            f"{table} {uri} was made again after this job had pinned {word} {snapshot.number} of "
            "the one before, which is gone: submit a new job"
        )


def table_files(spec: InputSpec, objects: Objects) -> TableFiles:
    """The files of the pinned snapshot; else of the one that is asked for, or the newest.

    Raises `InputError` where they cannot be read or are gone, `MissingExtraError`, `ObjectError`.
    """
    snapshot = spec.pinned or pin(spec, objects)
    schema, root, found = (_of_delta if spec.table == DELTA else _of_iceberg)(
        spec.uri, objects, snapshot
    )
    found.sort(key=lambda file: file.uri)
    infos = _infos(spec, objects, snapshot, root, found)
    return TableFiles(infos, schema, {file.uri: file.values for file in found})


_Found = tuple["pa.Schema", str, list[DataFile]]  # columns, where most files are, the files


def _of_delta(uri: str, objects: Objects, snapshot: Snapshot) -> _Found:
    table = delta.delta_table(uri, objects, snapshot.number)
    _check_same(uri, DELTA, snapshot, delta.id_of(table))
    delta.check_readable(uri, table)
    if snapshot.since is None:
        found = delta.data_files(uri, table)
    elif snapshot.since > snapshot.number:
        raise InputError(
            f"version {snapshot.since} of Delta table {uri} comes after version {snapshot.number}: "
            "was the table made anew? leave since out for one night"
        )
    else:
        found = delta.added_files(uri, objects, snapshot.since, snapshot.number)
    return delta.arrow_schema(table), tidy(uri), found


def _of_iceberg(uri: str, _: Objects, snapshot: Snapshot) -> _Found:
    table = iceberg.iceberg_table(uri)
    _check_same(uri, ICEBERG, snapshot, iceberg.id_of(table))
    iceberg.check_readable(uri, table, snapshot.number)
    if snapshot.since is None:
        found = iceberg.data_files(uri, table, snapshot.number)
    else:
        found = iceberg.added_files(uri, table, snapshot.since, snapshot.number)
    return iceberg.arrow_schema(table, snapshot.number), tidy(table.location()), found


def _infos(
    spec: InputSpec,
    objects: Objects,
    snapshot: Snapshot,
    root: str,
    found: Sequence[DataFile],
) -> list[ObjectInfo]:
    """Size and version of each file, by one listing where they lie below the table's root."""
    if not found:
        return []
    listed = {info.uri: info for info in objects.list(join(root, ""))}
    infos = [(file, listed.get(file.uri) or objects.head(file.uri)) for file in found]
    if gone := [file.uri for file, info in infos if info is None]:
        table, word = words_of(spec.table or DELTA)
        raise InputError(
            f"{word} {snapshot.number} of {table} {spec.uri} cannot be read any more: "
            f"{len(gone)} of its {len(found)} files are gone, as {gone[0]}, perhaps by a vacuum; "
            "submit a new job"
        )
    return [info for _, info in infos if info is not None]
