"""A group's prompts: its own rows of the file that it may share with groups cut off from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from specbatch.pipeline.ingest.artefacts import read_prompts
from specbatch.pipeline.ingest.confined import read_own
from specbatch.pipeline.ingest.objects import Objects
from specbatch.schemas.errors import ObjectError
from specbatch.schemas.records import Artefact, JobRow, PromptRow, Prompts

ReadRows = Callable[[Prompts], Sequence[PromptRow]]


def rows_of(objects: Objects, job: JobRow, prompts: Prompts) -> Sequence[PromptRow]:
    """The rows of a job's group, in order.

    Raises `ObjectError` when the file has fewer, or is none of the job's.
    """
    return reader(objects, job, files=1)(prompts)


def reader(objects: Objects, job: JobRow, files: int) -> ReadRows:
    """`rows_of` that keeps the last so many files: parts of one group read them once."""

    @lru_cache(maxsize=files)
    def read(file: Artefact) -> Sequence[PromptRow]:
        return read_prompts(read_own(objects, job, file))

    return lambda prompts: _slice(read(prompts.artefact), prompts)


def _slice(rows: Sequence[PromptRow], prompts: Prompts) -> Sequence[PromptRow]:
    mine = rows[prompts.row_start : prompts.row_start + prompts.rows]
    if len(mine) != prompts.rows:
        raise ObjectError(
            f"{prompts.artefact.uri} has {len(rows)} rows, fewer than the store knows of; "
            "the workspace was damaged"
        )
    return mine
