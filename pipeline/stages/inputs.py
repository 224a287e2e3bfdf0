"""A job's input: opened and checked as ingest begins, opened again when publish needs its rows."""

from __future__ import annotations

from specbatch.pipeline.inputs.contract import (
    INPUT_FILES,
    Source,
    check_same_files,
    files_digest,
)
from specbatch.pipeline.inputs.sources import open_source
from specbatch.pipeline.stages.context import StageContext
from specbatch.pipeline.stages.kept_columns import check_kept
from specbatch.pipeline.stages.lineage import input_facts
from specbatch.pipeline.stages.tables import input_of, pinned_snapshot, prepare_table
from specbatch.schemas.records import JobRow, JobWork
from specbatch.schemas.spec import InputSpec, JobSpec


def open_checked(
    context: StageContext, work: JobWork, job: JobRow, spec: JobSpec
) -> tuple[Source, dict[str, str]]:
    """The input, and what the job's report keeps of it: its files, and a table's snapshot.

    An output table that is missing is made. Raises `UsageError` for what cannot be read or kept, or
    has changed, and `ObjectError`.
    """
    given = input_of(context, job, spec)
    source = _opened(context, given, work, job)
    source.check()
    check_kept(source, spec)
    prepare_table(context, spec, source)
    if context.tells_lineage:
        context.store.note_report(work.lease, input_facts(source, spec.input).noted())
    return source, {INPUT_FILES: files_digest(source.files)} | pinned_snapshot(given)


def open_again(context: StageContext, work: JobWork, job: JobRow, spec: JobSpec) -> Source:
    """The input once more. Raises as `open_checked` does."""
    return _opened(context, input_of(context, job, spec), work, job)


def _opened(context: StageContext, given: InputSpec, work: JobWork, job: JobRow) -> Source:
    source = open_source(given, context.objects, context.reader_bytes)
    if work.cursor is not None:  # where nothing was stored of it, it may have been mended
        check_same_files(source.files, job.report, work.cursor)
    return source
