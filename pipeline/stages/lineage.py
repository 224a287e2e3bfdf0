"""What ingest and publish note of a job's files, for its lineage."""

from __future__ import annotations

import pyarrow as pa

from specbatch.pipeline.inputs.contract import Source, files_digest
from specbatch.pipeline.outputs.outputs import Manifest
from specbatch.schemas.lineage import MOST_FIELDS, InputFacts, OutputFacts
from specbatch.schemas.spec import InputSpec


def input_facts(source: Source, spec: InputSpec) -> InputFacts:
    """The files of a checked input, and its columns."""
    columns = source.columns()
    return InputFacts(
        fields=columns.there[:MOST_FIELDS],
        prompt=columns.prompt,
        id=columns.id,
        seed=spec.seed_column,
        sampling=spec.sampling_column,
        files=len(source.files),
        size_bytes=sum(info.size for info in source.files),
        version=files_digest(source.files),
    )


def output_facts(manifest: Manifest, own: pa.Schema, kept: pa.Schema | None) -> OutputFacts:
    """The published parts; `own` columns of an output, and those `kept` of the input."""
    more = kept if kept is not None else pa.schema([])
    fields = tuple((field.name, str(field.type)) for field in (*own, *more))
    return OutputFacts(
        fields=fields[:MOST_FIELDS],
        kept=tuple(more.names),
        rows=manifest.rows,
        files=len(manifest.parts),
        size_bytes=sum(part.size_bytes for part in manifest.parts),
    )
