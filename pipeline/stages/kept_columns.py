"""Columns of the input that go into the output, as ingest pins and publish reads them."""

from __future__ import annotations

import pyarrow as pa

from specbatch.pipeline.inputs.contract import Source
from specbatch.pipeline.inputs.kept import kept_schema
from specbatch.pipeline.outputs.parts import Kept
from specbatch.pipeline.stages.context import StageContext
from specbatch.pipeline.stages.input_files import open_kept
from specbatch.pipeline.stages.tables import input_of
from specbatch.schemas.arrow import output_schema
from specbatch.schemas.records import JobRow
from specbatch.schemas.spec import JobSpec


def check_kept(source: Source, spec: JobSpec) -> None:
    """Raises `InputError` for columns that cannot be kept."""
    if spec.output.keep_columns:
        _schema_of(source, spec)


def kept_columns(context: StageContext, job: JobRow, spec: JobSpec) -> Kept | None:
    """The columns, to be read with the output's rows. Raises `InputError` if the input changed."""
    if not spec.output.keep_columns:
        return None
    source = open_kept(context, job, input_of(context, job, spec))
    schema = _schema_of(source, spec)
    return Kept(schema, source.kept_rows(schema)) if schema.names else None


def _schema_of(source: Source, spec: JobSpec) -> pa.Schema:
    output = spec.output
    return kept_schema(source, output.keep_columns, output_schema(output.best_by is not None))
