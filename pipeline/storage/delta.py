"""Delta tables, through the library `deltalake`, and what it refuses in our words.

The library reads and writes the log, and writes data files. It reads none of them: whatever a table
is made of, the readers of `pipeline/inputs` decode it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import orjson

from specbatch.pipeline.storage.objects import Objects, join, tidy
from specbatch.pipeline.storage.tables import JOB, ROWS, AddedFiles, Commit, DataFile, inside
from specbatch.schemas.errors import InputError, ObjectError, UsageError, first_line
from specbatch.schemas.extras import require_tables_extra
from specbatch.schemas.table_spec import JOB_COLUMN

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

LOG = "_delta_log"
_MOST_LOG_BYTES = 256 << 20  # of one commit

# Features of a table that change nothing for readers of its files, unless they are in use.
_HARMLESS = {
    *("timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"),
    *("columnMapping", "deletionVectors"),  # looked for below
}
_SCHEMES = ("file", "s3")


def delta_table(uri: str, objects: Objects, version: int | None = None) -> DeltaTable:
    """The table as it was at a version, or as it is.

    Raises `InputError` if there is no such table or version, `MissingExtraError`, and `ObjectError`
    if its store is out of reach.
    """
    require_tables_extra("deltalake")
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError, TableNotFoundError

    scheme = uri.partition("://")[0] if "://" in uri else "file"
    if scheme not in _SCHEMES:
        raise InputError(f"a Delta table is read from a folder or s3://, and not from {scheme}://")
    place, options = tidy(uri).rstrip("/"), storage_options(uri, objects)
    try:
        with out_of_reach(uri):
            return DeltaTable(place, version=version, storage_options=options)
    except TableNotFoundError:
        if version is not None and has_table(uri, objects):
            raise _no_version(uri, version) from None
        raise InputError(
            f"{uri} is no Delta table: there is no {LOG} with a commit in it"
        ) from None
    except DeltaError as error:
        if version is not None and has_table(uri, objects):
            raise _no_version(uri, version) from error
        raise InputError(f"Delta table {uri} cannot be read: {_line(error)}") from error


def _no_version(uri: str, version: int) -> InputError:
    return InputError(
        f"version {version} of Delta table {uri} is not there: it was never written, or its part "
        "of the log was cleaned up; name another one, or submit a new job"
    )


def has_table(uri: str, objects: Objects) -> bool:
    """Whether there is a log."""
    return bool(objects.list(join(tidy(uri), LOG) + "/"))


def storage_options(uri: str, objects: Objects) -> dict[str, str] | None:
    """What the library needs to find a bucket beside the variables `AWS_*`, which it knows."""
    if not uri.startswith("s3://"):
        return None
    options = {"conditional_put": "etag"}
    if endpoint := objects.s3_endpoint_url:
        options["AWS_ENDPOINT_URL"] = endpoint
        options["AWS_ALLOW_HTTP"] = str(endpoint.startswith("http://")).lower()
        options["AWS_REGION"] = os.environ.get("AWS_REGION") or os.environ.get(
            "AWS_DEFAULT_REGION", "us-east-1"
        )
    return options


@contextmanager
def out_of_reach(uri: str) -> Iterator[None]:
    """The library's errors of storage as an `ObjectError`."""
    try:
        yield
    except OSError as error:
        raise ObjectError(
            f"cannot reach Delta table {uri}: {_line(error)}", passing=True
        ) from error


def _line(error: BaseException) -> str:
    return first_line(error, 300)


# --- reading ------------------------------------------------------------------------------------
def check_readable(uri: str, table: DeltaTable) -> None:
    """Raise `InputError` for features of a table that its data files do not show."""
    mode = table.metadata().configuration.get("delta.columnMapping.mode", "none")
    if mode != "none":
        raise InputError(
            f"Delta table {uri} has column mapping by {mode}, which is not read: copy it into a "
            "table without"
        )
    features = set(table.protocol().reader_features or ())
    if unknown := sorted(features - _HARMLESS):
        raise InputError(
            f"Delta table {uri} has {', '.join(unknown)}, which is not read: copy it into a table "
            "without"
        )
    if "deletionVectors" in features and (marked := _with_deletion_vectors(table)):
        raise with_deletion_vectors(uri, table.version(), marked)


def _with_deletion_vectors(table: DeltaTable) -> int:
    import pyarrow as pa
    from deltalake.exceptions import DeltaError

    try:
        return int(pa.table(table.deletion_vectors()).num_rows)
    except DeltaError as error:
        raise InputError(
            f"deletion vectors of Delta table {table.table_uri} cannot be read: {_line(error)}"
        ) from error


def with_deletion_vectors(uri: str, version: int, files: int) -> InputError:
    return InputError(
        f"version {version} of Delta table {uri} has {files} "
        f"{'file' if files == 1 else 'files'} with deletion vectors, which are not read: run "
        "REORG TABLE … APPLY (PURGE), and read the version after it"
    )


def id_of(table: DeltaTable) -> str:
    """The id of the table at its version, which no other table has that is made under its name.

    A merge with new columns (`merge_schema`) gives the table another one.
    """
    return str(table.metadata().id)


def arrow_schema(table: DeltaTable) -> pa.Schema:
    import pyarrow as pa

    return pa.schema(table.schema().to_arrow())


def data_files(uri: str, table: DeltaTable) -> list[DataFile]:
    """The files of the table's version, in no order."""
    import pyarrow as pa

    columns = list(table.metadata().partition_columns)
    found = pa.table(table.get_add_actions(flatten=True))
    paths = found.column("path").to_pylist()
    values = {
        name: found.column(f"partition.{name}").cast(pa.string()).to_pylist()
        for name in columns
        if f"partition.{name}" in found.column_names
    }
    return [
        DataFile(_place(uri, unquote(path)), {name: values[name][at] for name in values})
        for at, path in enumerate(paths)
    ]


def added_files(uri: str, objects: Objects, since: int, until: int) -> list[DataFile]:
    """The files that were added after version `since`, up to version `until`, in no order.

    What compaction writes anew is left out, for its rows are those of files that were added
    before. Raises `InputError` where a commit changed rows, or its part of the log is gone.
    """
    found = AddedFiles()
    for version in range(since + 1, until + 1):
        actions = _commit(uri, objects, version)
        added, moved = _by_path(actions, "add")
        removed, left = _by_path(actions, "remove")
        found.compact(moved, left)
        if (added and removed) or not found.change(added, removed):
            raise InputError(
                f"version {version} of Delta table {uri} changed rows ({_operation(actions)}), so "
                f"what was added since version {since} is not known: leave since out; "
                "reuse_outputs copies what was done before"
            )
        if any(add.get("deletionVector") for add in added.values()):
            raise with_deletion_vectors(uri, version, 1)
    return [_added(uri, add) for add in found.files.values()]


_Actions = dict[str, Mapping[str, Any]]


def _by_path(actions: Sequence[Mapping[str, Any]], kind: str) -> tuple[_Actions, _Actions]:
    """Actions of a kind: those that change the table's rows, and those of compaction."""
    of_kind = [action[kind] for action in actions if kind in action]
    data = {one["path"]: one for one in of_kind if one.get("dataChange", True)}
    return data, {one["path"]: one for one in of_kind if not one.get("dataChange", True)}


def _added(uri: str, add: Mapping[str, Any]) -> DataFile:
    values = {name: value or None for name, value in add["partitionValues"].items()}
    return DataFile(_place(uri, unquote(add["path"])), values)


def _commit(uri: str, objects: Objects, version: int) -> list[dict[str, Any]]:
    place = f"{tidy(uri).rstrip('/')}/{LOG}/{version:020d}.json"
    if not objects.exists(place):
        raise InputError(
            f"version {version} of Delta table {uri} is gone from its log, so what was added since "
            "is not known: leave since out for one night"
        )
    with objects.open(place) as file:
        text = file.read(_MOST_LOG_BYTES)
    try:
        return [orjson.loads(line) for line in text.splitlines() if line.strip()]
    except orjson.JSONDecodeError:
        raise InputError(f"{place} is damaged") from None


def _operation(actions: Sequence[Mapping[str, Any]]) -> str:
    infos = [action["commitInfo"] for action in actions if "commitInfo" in action]
    return str(infos[0].get("operation", "unknown")) if infos else "unknown"


def _place(uri: str, path: str) -> str:
    """A file of the table, whose path is relative to it, or whole. Raises `InputError`."""
    is_whole = "://" in path or path.startswith("/")
    return inside(uri, path if is_whole else join(tidy(uri), path), [uri])


# --- writing ------------------------------------------------------------------------------------
def create(
    uri: str, objects: Objects, schema: pa.Schema, partition_by: Sequence[str]
) -> DeltaTable:
    """The table, made if it is missing. Raises `InputError`, `UsageError` and `ObjectError`."""
    require_tables_extra("deltalake")
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    if not has_table(uri, objects):
        try:
            with out_of_reach(uri):
                DeltaTable.create(
                    tidy(uri),
                    schema,
                    mode="ignore",
                    partition_by=list(partition_by),
                    storage_options=storage_options(uri, objects),
                )
        except (DeltaError, TypeError, ValueError) as error:
            if not has_table(uri, objects):  # else another job has just made it
                raise UsageError(f"cannot make Delta table {uri}: {_line(error)}") from error
    return delta_table(uri, objects)


def check_schema(uri: str, schema: pa.Schema) -> None:
    """Raise `UsageError` for columns that such a table cannot have, and `MissingExtraError`."""
    require_tables_extra("deltalake")
    from deltalake import Schema

    for field in schema:
        try:
            Schema.from_arrow(schema.empty_table().select([field.name]).schema)
        except Exception as error:  # the library raises many kinds for one meaning
            raise UsageError(
                f"column `{field.name}` is {field.type}, which Delta table {uri} cannot hold: "
                "leave it out of output.keep_columns, or change its type"
            ) from error


def committed(table: DeltaTable, commit: Commit) -> tuple[bool, int | None]:
    """Whether the job has committed anything, and the version that has these very rows."""
    number = table.transaction_version(commit.job_id)
    if number is None:
        return False, None
    if number != commit.number:
        return True, None
    for one in table.history():
        if (one.get(JOB), one.get(ROWS)) == (commit.job_id, commit.rows_sha256):
            return True, int(one["version"])
    return True, table.version()  # its part of the log is gone


def append(
    uri: str,
    table: DeltaTable,
    commit: Commit,
    schema: pa.Schema,
    rows: Callable[[], Iterator[pa.RecordBatch]],
    replaces: bool,
) -> int:
    """Commit rows; `replaces`: in the place of those that the job has committed before.

    Two commits of one job cannot both follow the version that `table` is at. Returns the version;
    raises `UsageError`, and `ObjectError` where another try may help.
    """
    import pyarrow as pa
    from deltalake import write_deltalake

    reader = pa.RecordBatchReader.from_batches(schema, rows())
    with _commit_errors(uri):
        if replaces:
            write_deltalake(
                table,
                reader,
                mode="overwrite",
                predicate=f"{JOB_COLUMN} = '{commit.job_id}'",
                commit_properties=_properties(commit),
            )
        else:
            write_deltalake(table, reader, mode="append", commit_properties=_properties(commit))
    return table.version()


def merge(
    uri: str,
    table: DeltaTable,
    commit: Commit,
    schema: pa.Schema,
    rows: Callable[[], Iterator[pa.RecordBatch]],
    replaces: bool,
    key: Sequence[str],
) -> int:
    """The same as an upsert: a row replaces the one that has the same key. `replaces`: also those
    that the job has committed before, whatever their keys."""
    import pyarrow as pa

    reader = pa.RecordBatchReader.from_batches(schema, rows())
    same = " AND ".join(f"target.`{name}` = source.`{name}`" for name in key)
    with _commit_errors(uri):
        merger = (
            table.merge(
                reader,
                predicate=same,
                source_alias="source",
                target_alias="target",
                commit_properties=_properties(commit),
            )
            .when_matched_update_all()
            .when_not_matched_insert_all()
        )
        if replaces:
            merger = merger.when_not_matched_by_source_delete(
                f"target.`{JOB_COLUMN}` = '{commit.job_id}'"
            )
        merger.execute()
    return table.version()


def _properties(commit: Commit) -> Any:
    from deltalake import CommitProperties, Transaction

    return CommitProperties(
        custom_metadata=commit.properties,
        app_transactions=[Transaction(commit.job_id, commit.number, int(time.time() * 1000))],
    )


@contextmanager
def _commit_errors(uri: str) -> Iterator[None]:
    from deltalake.exceptions import CommitFailedError, DeltaError

    try:
        with out_of_reach(uri):
            yield
    except CommitFailedError as error:
        raise ObjectError(
            f"another writer was faster at Delta table {uri}: {_line(error)}", passing=True
        ) from error
    except DeltaError as error:
        raise ObjectError(f"Delta table {uri} takes no rows: {_line(error)}") from error
