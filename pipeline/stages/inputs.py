"""A job's input: opened and checked as ingest begins, opened again when publish needs its rows."""

from __future__ import annotations

from specbatch.pipeline.inputs.contract import INPUT_FILES, Source, files_digest
from specbatch.pipeline.inputs.sources import open_source
from specbatch.pipeline.stages.context import StageContext
from specbatch.pipeline.stages.kept_columns import check_kept
from specbatch.pipeline.stages.lineage import input_facts
from specbatch.pipeline.stages.tables import input_of, pinned_snapshot, prepare_table
from specbatch.schemas.records import JobRow, Lease
from specbatch.schemas.spec import JobSpec


def open_checked(
    context: StageContext, lease: Lease, job: JobRow, spec: JobSpec
) -> tuple[Source, dict[str, str]]:
    """The input, and what the job's report keeps of it: its files, and a table's snapshot.

    An output table that is missing is made. Raises `UsageError` for what cannot be read or kept, or
    has changed, and `ObjectError`.
    """
    given = input_of(context, job, spec)
    source = open_source(given, context.objects, context.reader_bytes)
    source.check()
    check_kept(source, job, spec)
    prepare_table(context, spec, source)
    if context.tells_lineage:
        context.store.note_report(lease, input_facts(source, spec.input).noted())
    return source, {INPUT_FILES: files_digest(source.files)} | pinned_snapshot(given)


def open_again(context: StageContext, job: JobRow, spec: JobSpec) -> Source:
    """The input once more. Raises as `open_checked` does."""
    return open_source(input_of(context, job, spec), context.objects, context.reader_bytes)
