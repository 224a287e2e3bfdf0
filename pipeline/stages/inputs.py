"""A job's input: opened and checked as ingest begins, opened again when publish needs its rows."""

from __future__ import annotations

from typing import Any

from specbatch.pipeline.inputs.contract import INPUT_FILES, Source, files_digest
from specbatch.pipeline.inputs.sources import open_source
from specbatch.pipeline.stages.context import StageContext
from specbatch.pipeline.stages.input_files import keep_files, open_kept
from specbatch.pipeline.stages.kept_columns import check_kept
from specbatch.pipeline.stages.lineage import input_facts
from specbatch.pipeline.stages.tables import input_of, pinned_snapshot, prepare_table
from specbatch.schemas.records import JobRow, JobWork
from specbatch.schemas.spec import InputSpec, JobSpec


def open_checked(
    context: StageContext, work: JobWork, job: JobRow, spec: JobSpec
) -> tuple[Source, dict[str, Any]]:
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
    if given.pinned is not None:
        return source, {INPUT_FILES: files_digest(source.files)} | pinned_snapshot(given)
    return source, {} if _is_begun(work) else keep_files(context, job, given, source.files)


def open_again(context: StageContext, work: JobWork, job: JobRow, spec: JobSpec) -> Source:
    """The input once more. Raises as `open_checked` does."""
    return _opened(context, input_of(context, job, spec), work, job)


def _opened(context: StageContext, given: InputSpec, work: JobWork, job: JobRow) -> Source:
    if _is_begun(work):
        return open_kept(context, job, given)
    return open_source(given, context.objects, context.reader_bytes)


def _is_begun(work: JobWork) -> bool:
    """Whether rows are stored. Before that, the input may be changed and tried again."""
    return work.cursor is not None
