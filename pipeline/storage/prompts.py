"""Reads a group's prompts: its own rows of a file that groups split off from it share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import count

from specbatch.pipeline.storage.artefacts import read_prompts
from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.storage.workspace import check_own, read_own
from specbatch.schemas.errors import ObjectError
from specbatch.schemas.records import Artefact, JobRow, PromptRow, Prompts

ReadRows = Callable[[Prompts], Sequence[PromptRow]]


def rows_of(objects: Objects, job: JobRow, prompts: Prompts) -> Sequence[PromptRow]:
    """The rows of a job's group, in order.

    Raises `ObjectError` if the file has fewer rows, or is not the job's.
    """
    return reader(objects, job, files=1)(prompts)


def reader(objects: Objects, job: JobRow, files: int) -> ReadRows:
    """A `rows_of` that caches the last `files` files, so that split groups share one read."""

    @lru_cache(maxsize=files)
    def read(file: Artefact) -> Sequence[PromptRow]:
        return read_prompts(read_own(objects, job, file))

    return lambda prompts: _slice(read(prompts.artefact), prompts)


def in_order(
    objects: Objects, job: JobRow, prompts_of: Callable[[int], Prompts | None]
) -> Iterator[PromptRow]:
    """All rows of a job in order, whatever the state of their groups, one file at a time.

    `prompts_of` finds a group's prompts by its index. Rows of missing files are skipped; damaged
    files raise `ObjectError`.
    """
    for index in count():  # planned groups only: split groups share their files
        prompts = prompts_of(index)
        if prompts is None:
            return
        check_own(job, prompts.artefact)
        if objects.exists(prompts.artefact.uri):
            yield from read_prompts(read_own(objects, job, prompts.artefact))


class PromptFinder:
    """Finds the prompts of rows, which callers request in order."""

    def __init__(self, rows: Iterator[PromptRow]) -> None:
        self._rows = rows
        self._row = next(rows, None)

    def of(self, row_index: int) -> Sequence[int] | None:
        """The token ids of a row's prompt; None if they are gone."""
        while self._row is not None and self._row.row_index < row_index:
            self._row = next(self._rows, None)
        if self._row is None or self._row.row_index != row_index:
            return None
        return self._row.prompt_ids


def _slice(rows: Sequence[PromptRow], prompts: Prompts) -> Sequence[PromptRow]:
    mine = rows[prompts.row_start : prompts.row_start + prompts.rows]
    if len(mine) != prompts.rows:
        raise ObjectError(
            f"{prompts.artefact.uri} has {len(rows)} rows, fewer than the store says; "
            "the workspace was damaged"
        )
    return mine
