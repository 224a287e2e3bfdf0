"""Columns of an input that a job carries into its output (`output.keep_columns`).

They are read when the output is written, from the files that the job has read: an input that
changed meanwhile is refused. One batch is in memory at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from specbatch.pipeline.inputs.contract import Source
from specbatch.pipeline.storage.object_store import ObjectInfo
from specbatch.schemas import arrow
from specbatch.schemas.errors import InputError
from specbatch.schemas.spec import KeptColumns

INPUT_FILES = "input_files"  # key of a job's report: a digest of their names and versions
ALL = "all"


def kept_schema(source: Source, wanted: KeptColumns) -> pa.Schema:
    """The columns to keep, with their types. Raises `InputError` for one that there is not, or
    that the output has itself, and `ObjectError`."""
    schema = source.kept_schema(None if wanted == ALL else wanted)
    for name in schema.names:
        if name in arrow.OUTPUT.names:
            raise InputError(
                f"column `{name}` of the input cannot be kept, because the output has one of that "
                "name; rename it, or name other columns in output.keep_columns"
            )
    return schema


def kept_names(there: Sequence[str], wanted: Sequence[str] | None, row_id: str | None) -> list[str]:
    """The names of the columns to keep, for all of `there` if none are wanted.

    Of all columns a row's `id` is left out: the output has it.
    """
    if wanted is not None:
        return list(wanted)
    return [name for name in there if not name == row_id == "id"]


def files_digest(files: Sequence[ObjectInfo]) -> str:
    """SHA-256 of the files' names and versions."""
    said = "".join(f"{info.uri}\0{info.version}\0" for info in files)
    return hashlib.sha256(said.encode()).hexdigest()


def check_same_files(source: Source, report: Mapping[str, Any]) -> None:
    """Raise `InputError` unless these are the files that the job began to read."""
    known = report.get(INPUT_FILES)
    if known is not None and known != files_digest(source.files):
        raise InputError(
            "files of the input were added, removed or changed since this job began reading it, "
            "and output.keep_columns needs them; make them as they were and use `specbatch retry`"
        )
