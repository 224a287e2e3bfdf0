"""Tables around a job: the snapshot that it reads, and the table that gets its finished rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from specbatch.pipeline.inputs.contract import Source
from specbatch.pipeline.inputs.kept import kept_schema
from specbatch.pipeline.inputs.tables import pin
from specbatch.pipeline.outputs.table_output import check_apart, commit_rows, prepare
from specbatch.pipeline.runtime.leases import Held
from specbatch.pipeline.runtime.snapshots import last_read, snapshot_of
from specbatch.pipeline.stages.context import StageContext
from specbatch.schemas.arrow import output_schema
from specbatch.schemas.errors import OutputError
from specbatch.schemas.exports import WrittenFile
from specbatch.schemas.records import JobRow
from specbatch.schemas.spec import InputSpec, JobSpec
from specbatch.schemas.table_spec import OUTPUT_SNAPSHOT


def input_of(context: StageContext, job: JobRow, spec: JobSpec) -> InputSpec:
    """The input as the job reads it. A table has its snapshot, which is pinned now if it is not.

    Raises `UsageError`, `InUseError` and `ObjectError`.
    """
    if spec.input.table is None:
        return spec.input
    found = snapshot_of(job) or pin(
        spec.input,
        context.objects,
        lambda: last_read(context.store, spec.input, job.tenant, job.name, job.job_id),
    )
    return spec.input.pinned_to(found)


def pinned_snapshot(spec: InputSpec) -> dict[str, str]:
    """What the job's report keeps of a table that is read."""
    return {} if spec.pinned is None else spec.pinned.to_report()


def input_table(job: JobRow, spec: JobSpec) -> dict[str, Any]:
    """What the manifest says of a table that was read."""
    snapshot = snapshot_of(job)
    if spec.input.table is None or snapshot is None:
        return {}
    said = {"uri": spec.input.uri, "kind": spec.input.table, **snapshot.to_facts()}
    return {"input_table": said}


def prepare_table(context: StageContext, spec: JobSpec, source: Source) -> None:
    """Make the output table if it is missing. Raises `OutputError` where it cannot take the job's
    rows, before any of them is computed, and `ObjectError`."""
    if spec.output.table is not None:
        check_apart(spec.output.table, spec.output.uri)
        columns = columns_of(spec, source)
        check_key(spec, source)
        prepare(spec.output.table, context.objects, columns, makes=True)


def check_key(spec: JobSpec, source: Source) -> None:
    """Raise `OutputError` where the key of a merge has numbers of rows for ids, and nothing that
    tells one job's rows from another's: they would replace them.

    Of JSON lines the first ones count; a later one without an id is quarantined (`rows.py`).
    """
    table, read = spec.output.table, source.columns()
    if table is None or read.id is not None or not read.there:
        return
    if table.needs_ids(output_schema(spec.output.best_by is not None).names):
        raise OutputError(
            "output.table.key has `id`, which is the row's number because the input has no ids, so "
            "rows of one job would replace those of another: name input.id_column, or a column of "
            "output.keep_columns in the key"
        )


def columns_of(spec: JobSpec, source: Source) -> pa.Schema:
    """The columns of the job's output, with those of the input that it keeps."""
    own = output_schema(spec.output.best_by is not None)
    kept = kept_schema(source, spec.output.keep_columns, own) if spec.output.keep_columns else ()
    return pa.schema([*own, *kept])


def table_commit(
    context: StageContext, held: Held, spec: JobSpec
) -> Callable[[Sequence[WrittenFile]], Mapping[str, Any]] | None:
    """Commits the finished rows of parts to the output table, once, and returns what the manifest
    says of it; None for a job without one."""
    table, lease = spec.output.table, held.lease
    if table is None:
        return None
    confirm = partial(context.lease_keeper.confirm, held)

    def commit(parts: Sequence[WrittenFile]) -> Mapping[str, Any]:
        done = commit_rows(table, context.objects, lease.job_id, spec.output.uri, parts, confirm)
        if done.snapshot is not None:
            context.store.note_report(lease, {OUTPUT_SNAPSHOT: str(done.snapshot)})
        said = {"uri": table.uri, "kind": table.kind, "mode": table.mode, "rows": done.rows}
        return {"table": {**said, "snapshot": done.snapshot}}

    return commit
