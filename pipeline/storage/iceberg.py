"""Iceberg tables, through the library `pyiceberg`, and what it refuses in our words.

The library knows catalogs, metadata and manifests, and writes data files. Data files of inputs are
decoded by the readers of `pipeline/inputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from specbatch.pipeline.storage.tables import JOB, ROWS, AddedFiles, Commit, DataFile, inside
from specbatch.schemas.errors import InputError, ObjectError, UsageError, first_line
from specbatch.schemas.extras import require_tables_extra
from specbatch.schemas.table_spec import JOB_COLUMN, iceberg_name

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.catalog import Catalog
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table, Transaction
    from pyiceberg.table.snapshots import Snapshot

_OUR_ROW, _THEIR_ROW = "our row", "their row"  # columns of numbers, while keys are compared
_DATA_PATH = "write.data.path"  # a table's property: where its data files are, if not below it


# --- opening ------------------------------------------------------------------------------------
def iceberg_table(uri: str) -> Table:
    """The table as its catalog knows it. Raises `InputError` if it does not, `MissingExtraError`,
    and `ObjectError` if the catalog is out of reach."""
    table = table_if_there(uri)
    if table is None:
        raise InputError(f"{uri} is not there: its catalog has no such table")
    return table


def table_if_there(uri: str) -> Table | None:
    """The same, and None for a table that the catalog does not know."""
    from pyiceberg.exceptions import NoSuchTableError

    catalog, name = _catalog(uri)
    try:
        with out_of_reach(uri):
            return catalog.load_table(name)
    except NoSuchTableError:
        return None


def _catalog(uri: str) -> tuple[Catalog, str]:
    require_tables_extra("pyiceberg")
    from pyiceberg.catalog import load_catalog

    catalog, name = iceberg_name(uri)
    try:
        with out_of_reach(uri):
            return load_catalog(catalog), name
    except (ValueError, ImportError) as error:  # not configured, or a part that it needs is missing
        raise UsageError(
            f"pyiceberg cannot open catalog {catalog} of {uri}: {first_line(error, 300)}; its "
            "properties belong in ~/.pyiceberg.yaml or PYICEBERG_CATALOG__… variables"
        ) from error


@contextmanager
def out_of_reach(uri: str) -> Iterator[None]:
    """Errors of the catalog's server and of storage as an `ObjectError`."""
    from pyiceberg.exceptions import RESTError

    try:
        yield
    except (OSError, RESTError) as error:
        raise ObjectError(
            f"cannot reach Iceberg table {uri}: {first_line(error, 300)}", passing=True
        ) from error


# --- reading ------------------------------------------------------------------------------------
def newest_snapshot(uri: str, table: Table) -> int:
    """Raises `InputError` for a table that nobody has written to."""
    snapshot = table.current_snapshot()
    if snapshot is None:
        raise InputError(f"Iceberg table {uri} has no snapshot: nobody has written to it")
    return int(snapshot.snapshot_id)


def check_readable(uri: str, table: Table, number: int) -> None:
    """Raise `InputError` for a snapshot that is not there, and for a table whose files cannot be
    read by the names of their columns."""
    snapshot = table.snapshot_by_id(number)
    if snapshot is None:
        raise InputError(
            f"snapshot {number} of Iceberg table {uri} is not there: it has expired, or never was; "
            "name another one, or submit a new job"
        )
    ids: dict[str, int] = {}
    names: dict[int, str] = {}
    for schema in _schemas_of(table, snapshot):
        for field in schema.fields:
            if ids.setdefault(field.name, field.field_id) != field.field_id or (
                names.setdefault(field.field_id, field.name) != field.name
            ):
                raise InputError(
                    f"column `{field.name}` of Iceberg table {uri} was renamed, or has replaced "
                    "another one, which is not read: copy it into a new table"
                )
            if getattr(field, "initial_default", None) is not None:
                raise InputError(
                    f"column `{field.name}` of Iceberg table {uri} has a default for earlier rows, "
                    "which is not read: copy it into a new table"
                )


def _schemas_of(table: Table, snapshot: Snapshot) -> list[Schema]:
    """Those that the snapshot's files may have been written with: its own and those of snapshots
    before it; all, where one of these has expired. One that comes back has its first number."""
    known = {one.snapshot_id: one for one in table.snapshots()}
    numbers: set[int] = set()
    at: Snapshot | None = snapshot
    while at is not None and at.schema_id is not None:
        numbers.add(at.schema_id)
        if at.parent_snapshot_id is None:
            return [schema for number, schema in table.schemas().items() if number in numbers]
        at = known.get(at.parent_snapshot_id)
    return list(table.schemas().values())


def id_of(table: Table) -> str:
    """The table's own id, which no other table has that is made under its name."""
    return str(table.metadata.table_uuid)


def arrow_schema(table: Table, number: int) -> pa.Schema:
    """The columns of a snapshot, in the types that readers of its files give them."""
    import pyarrow as pa

    schema = table.scan(snapshot_id=number).projection().as_arrow()
    return pa.schema([pa.field(field.name, _as_in_files(field.type)) for field in schema])


def _as_in_files(kind: pa.DataType) -> pa.DataType:
    """The library makes all texts, binaries and lists large."""
    import pyarrow as pa

    types = pa.types
    if types.is_large_string(kind):
        return pa.string()
    if types.is_large_binary(kind):
        return pa.binary()
    if types.is_struct(kind):
        return pa.struct([field.with_type(_as_in_files(field.type)) for field in kind])
    if types.is_map(kind):
        item = kind.item_field.with_type(_as_in_files(kind.item_type))
        return pa.map_(kind.key_field.with_type(_as_in_files(kind.key_type)), item)
    if types.is_list(kind) or types.is_large_list(kind):
        return pa.list_(kind.value_field.with_type(_as_in_files(kind.value_type)))
    return kind


def data_files(uri: str, table: Table, number: int) -> list[DataFile]:
    """The files of a snapshot, in no order. Raises `InputError` for rows that are deleted on
    reading, and for files that are not Parquet."""
    try:
        with out_of_reach(uri):
            tasks = list(table.scan(snapshot_id=number).plan_files())
    except (ValueError, NotImplementedError) as error:
        if "equality delete" not in str(error):
            raise
        raise _deleted_on_reading(uri, number) from error
    if any(getattr(task, "delete_files", None) for task in tasks):
        raise _deleted_on_reading(uri, number)
    return [_data_file(uri, table, task.file) for task in tasks]


def added_files(uri: str, table: Table, since: int, until: int) -> list[DataFile]:
    """The files that were added after snapshot `since`, up to snapshot `until`, in no order.

    Compaction adds none. Raises `InputError` where rows were changed or `since` is not before
    `until`.
    """
    from pyiceberg.table.snapshots import Operation

    found = AddedFiles()
    for snapshot in _between(uri, table, since, until):
        operation = snapshot.summary.operation if snapshot.summary else Operation.OVERWRITE
        if operation == Operation.REPLACE:
            found.compact(*_changes(uri, table, snapshot, is_compaction=True))
        elif operation == Operation.OVERWRITE or not found.change(*_changes(uri, table, snapshot)):
            raise InputError(
                f"snapshot {snapshot.snapshot_id} of Iceberg table {uri} changed rows, so what was "
                f"added since snapshot {since} is not known: leave since out; reuse_outputs copies "
                "what was done before"
            )
    return [_data_file(uri, table, file) for file in found.files.values()]


def _changes(
    uri: str, table: Table, snapshot: Snapshot, is_compaction: bool = False
) -> tuple[dict[str, Any], set[str]]:
    """The data files that a snapshot added, and the places of those that it removed."""
    from pyiceberg.manifest import ManifestContent, ManifestEntryStatus

    added: dict[str, Any] = {}
    removed: set[str] = set()
    with out_of_reach(uri):
        for manifest in snapshot.manifests(table.io):
            if manifest.added_snapshot_id != snapshot.snapshot_id:
                continue
            if manifest.content == ManifestContent.DELETES:
                if is_compaction:
                    continue
                raise _deleted_on_reading(uri, snapshot.snapshot_id)
            for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=False):
                if entry.snapshot_id != snapshot.snapshot_id:
                    continue
                if entry.status == ManifestEntryStatus.ADDED:
                    added[entry.data_file.file_path] = entry.data_file
                elif entry.status == ManifestEntryStatus.DELETED:
                    removed.add(entry.data_file.file_path)
    return added, removed


def _between(uri: str, table: Table, since: int, until: int) -> list[Snapshot]:
    """The snapshots after one, up to another, in order."""
    found: list[Snapshot] = []
    at: int | None = until
    while at != since:
        snapshot = None if at is None else table.snapshot_by_id(at)
        if snapshot is None:
            raise InputError(
                f"snapshot {since} of Iceberg table {uri} is not before snapshot {until}, or "
                "snapshots between them have expired, so what was added since is not known: leave "
                "since out for one night"
            )
        found.append(snapshot)
        at = snapshot.parent_snapshot_id
    return found[::-1]


def _deleted_on_reading(uri: str, number: int) -> InputError:
    return InputError(
        f"snapshot {number} of Iceberg table {uri} has files of deleted rows (merge-on-read), "
        "which are not read: rewrite its data files, and read the snapshot after that"
    )


def _data_file(uri: str, table: Table, file: Any) -> DataFile:
    from pyiceberg.transforms import IdentityTransform

    kind = str(getattr(file.file_format, "value", file.file_format)).upper()
    if kind != "PARQUET":
        raise InputError(f"Iceberg table {uri} has files of {kind}: only Parquet is read")
    spec = table.specs()[file.spec_id]
    schema = table.schema()
    values = {
        name: file.partition[at]
        for at, field in enumerate(spec.fields)
        if isinstance(field.transform, IdentityTransform)
        and (name := schema.find_column_name(field.source_id)) is not None
    }
    own = table.properties.get(_DATA_PATH)
    roots = [table.location(), *([own] if own else [])]
    return DataFile(inside(uri, str(file.file_path), roots), values)


# --- writing ------------------------------------------------------------------------------------
def create(uri: str, schema: pa.Schema, partition_by: Sequence[str]) -> Table:
    """The table. One that is missing is made in one commit, so nobody meets it without its
    partitions. Raises as `iceberg_table` does."""
    from pyiceberg.exceptions import CommitFailedException, TableAlreadyExistsError

    if (table := table_if_there(uri)) is not None:
        return table
    catalog, name = _catalog(uri)
    try:
        with out_of_reach(uri):
            catalog.create_namespace_if_not_exists(name.rpartition(".")[0])
            made = catalog.create_table_transaction(name, schema)
            with made.update_spec() as update:
                for column in partition_by:
                    update.add_identity(column)
            made.commit_transaction()
    except (CommitFailedException, TableAlreadyExistsError):
        pass  # another job has just made it
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UsageError(f"cannot make Iceberg table {uri}: {first_line(error, 300)}") from error
    return iceberg_table(uri)


def committed(table: Table, commit: Commit) -> tuple[bool, int | None]:
    """Whether the job has committed anything, and the snapshot that has these very rows."""
    ours = [
        (int(one.snapshot_id), one.summary.additional_properties.get(ROWS))
        for one in sorted(table.snapshots(), key=lambda one: one.sequence_number or 0)
        if one.summary is not None and one.summary.additional_properties.get(JOB) == commit.job_id
    ]
    if not ours:
        return False, None
    number, rows = ours[-1]  # a commit may consist of several snapshots
    return True, number if rows == commit.rows_sha256 else None


def write(
    uri: str,
    table: Table,
    commit: Commit,
    tables: Callable[[], Iterator[pa.Table]],
    replaces: bool,
    key: Sequence[str] = (),
) -> int:
    """Commit rows in one transaction: appended, or merged by a key. `replaces`: in the place of
    those that the job has committed before.

    Returns the snapshot. Raises `UsageError`, and `ObjectError` where another try may help.
    """
    import pyarrow as pa
    from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException

    properties = commit.properties
    # The library would repeat a commit that lost a race, without looking whether the winner was
    # another publication of this job. Who calls us looks, and then tries again.
    once = {**table.metadata.properties, "commit.retry.num-retries": "0"}
    table.metadata = table.metadata.model_copy(update={"properties": once})
    try:
        with out_of_reach(uri), table.transaction() as transaction:
            if key:
                rows = pa.concat_tables(tables())
                _merge(transaction, table, rows, list(key), commit, replaces)
            else:
                if replaces:
                    ours = f"{JOB_COLUMN} == '{commit.job_id}'"
                    transaction.delete(ours, snapshot_properties=properties)
                for rows in tables():
                    transaction.append(rows, snapshot_properties=properties)
    except (CommitFailedException, CommitStateUnknownException) as error:
        raise ObjectError(
            f"another writer was faster at Iceberg table {uri}: {first_line(error, 300)}",
            passing=True,
        ) from error
    except (ValueError, TypeError) as error:
        raise ObjectError(f"Iceberg table {uri} takes no rows: {first_line(error, 300)}") from error
    return newest_snapshot(uri, table)


def _merge(
    transaction: Transaction,
    table: Table,
    ours: pa.Table,
    key: list[str],
    commit: Commit,
    replaces: bool,
) -> None:
    """A row replaces the one with its key, and keeps what that has in columns that ours lack.
    `replaces`: the job's earlier rows with other keys go.

    Here one column of the key selects the rows to be read and deleted, and those of them with
    another key are written again. The library's `upsert` makes a condition of each row for a key of
    several columns, and compares values one by one: 8 s of processor time for 2,000 rows, half of
    them known, where this takes 1.6 s for 20,000. Raises `ValueError` where two rows of the table
    have one key.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyiceberg.expressions import BooleanExpression, EqualTo, In, Or

    by = max(key, key=lambda name: pc.count_distinct(ours.column(name)).as_py())
    values = pc.unique(ours.column(by)).to_pylist()
    alike: BooleanExpression = In(by, values)  # type: ignore[call-arg]  # mypy takes its fields for its parameters
    if replaces:
        alike = Or(alike, EqualTo(JOB_COLUMN, commit.job_id))  # type: ignore[call-arg]  # as above
    theirs = table.scan(row_filter=alike).to_arrow()
    at = _matches(ours.select(key), theirs.select(key))
    columns = [
        ours.column(name) if name in ours.column_names else theirs.column(name).take(at)
        for name in theirs.column_names
    ]
    rows = pa.Table.from_arrays(columns, names=theirs.column_names).cast(theirs.schema)
    is_gone = pc.is_in(pa.array(range(theirs.num_rows), pa.int64()), value_set=at.drop_null())
    if replaces:
        earlier = pc.is_in(theirs.column(JOB_COLUMN), value_set=pa.array([commit.job_id]))
        is_gone = pc.or_(is_gone, earlier)
    if pc.any(is_gone).as_py():
        rows = pa.concat_tables([theirs.filter(pc.invert(is_gone)), rows])
        transaction.delete(alike, snapshot_properties=commit.properties)
    transaction.append(rows, snapshot_properties=commit.properties)


def _matches(ours: pa.Table, theirs: pa.Table) -> pa.Array:
    """For each of our keys, of which no two are equal, the number of their row with it, or null."""
    import pyarrow as pa

    left = ours.cast(theirs.schema).append_column(
        _OUR_ROW, pa.array(range(ours.num_rows), pa.int64())
    )
    right = theirs.append_column(_THEIR_ROW, pa.array(range(theirs.num_rows), pa.int64()))
    found = left.join(right, keys=ours.column_names, join_type="left outer").sort_by(_OUR_ROW)
    if found.num_rows > ours.num_rows:
        named = ", ".join(ours.column_names)
        raise ValueError(f"two of its rows have the same {named}, which is the key of the merge")
    return found.column(_THEIR_ROW).combine_chunks()
