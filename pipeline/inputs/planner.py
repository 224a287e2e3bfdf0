"""Plans rows into groups, and writes planned groups to the workspace.

Planning is pure: the groups depend only on the rows, the limits and the start. Planning from the
cursor of any group gives the groups that an uninterrupted run would have given.

A few groups go into the store in one transaction, and their files are written side by side. The
first group goes alone, so that a verifier starts at once; then two go together, then four, and so
on. A long input takes a sixteenth of the transactions, and one file's sync (or upload) overlaps
with the next one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from specbatch.pipeline.inputs.contract import RawBatch, Source, files_from
from specbatch.pipeline.inputs.rows import RowChecker
from specbatch.pipeline.storage.artefacts import write_prompts
from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.storage.workspace import put_own
from specbatch.schemas.errors import InputError
from specbatch.schemas.records import (
    JobRow,
    NewGroup,
    PromptRow,
    RejectedRow,
    SourcePosition,
    Stage,
)
from specbatch.schemas.usage import carried

MAX_GROUP_TOKENS = 1 << 18  # prompt tokens of one group
MAX_REJECTED_PER_GROUP = 10_000  # so that an input of bad rows stays bounded too
ROWS_PER_CHECK = 512  # tokenised together, so that the first group is ready early


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A group's rows, and the bad rows met on the way to its end.

    `rows` may be empty (at the end of the input, or in a long run of bad rows); such a plan uses no
    group index. `source` is where the first row begins; `cursor` and `next_row` are where reading
    of the next group begins.
    """

    index: int
    rows: tuple[PromptRow, ...]
    rejected: tuple[RejectedRow, ...]
    source: SourcePosition
    cursor: SourcePosition
    next_row: int

    @property
    def prompt_tokens(self) -> int:
        return sum(len(row.prompt_ids) for row in self.rows)


@dataclass(slots=True)
class _Open:
    """The group being filled."""

    rows: list[PromptRow] = field(default_factory=list)
    rejected: list[RejectedRow] = field(default_factory=list)
    tokens: int = 0
    source: SourcePosition | None = None  # of the first accepted row, else of the first row

    def close(self, index: int, cursor: SourcePosition, next_row: int) -> PlannedGroup:
        return PlannedGroup(
            index, tuple(self.rows), tuple(self.rejected), self.source or cursor, cursor, next_row
        )

    def add(self, row: PromptRow | RejectedRow, position: SourcePosition) -> None:
        if isinstance(row, RejectedRow):
            self.rejected.append(row)
            self.source = self.source or position
            return
        if not self.rows:
            self.source = position
        self.rows.append(row)
        self.tokens += len(row.prompt_ids)


def plan(
    source: Source,
    checker: RowChecker,
    group_size: int,
    start: SourcePosition | None = None,
    next_row: int = 0,
    next_group: int = 0,
    max_group_tokens: int = MAX_GROUP_TOKENS,
) -> Iterator[PlannedGroup]:
    """Plan groups of at most `group_size` rows and `max_group_tokens` prompt tokens (or one row).

    To resume, pass the last `cursor` with its `next_row` and the next group index. The ids before
    the cursor are read again to detect duplicates. Raises `InputError`, also if their number has
    changed.
    """
    if start is not None and source.has_ids:
        _remember(source, checker, start, next_row)
    filling, index, row_index, cursor = _Open(), next_group, next_row, start
    for batch in _parts(source.read(start)):
        for i, row in enumerate(checker.check(batch, row_index, source.has_ids)):
            here = batch.position(i)
            full = isinstance(row, PromptRow) and filling.rows and (
                filling.tokens + len(row.prompt_ids) > max_group_tokens
            )  # fmt: skip
            if full:
                yield filling.close(index, here, row_index + i)
                filling, index = _Open(), index + 1
            filling.add(row, here)
            if len(filling.rows) >= group_size or len(filling.rejected) >= MAX_REJECTED_PER_GROUP:
                yield filling.close(index, batch.position(i + 1), row_index + i + 1)
                filling, index = _Open(), index + bool(filling.rows)
        row_index += len(batch.rows)
        cursor = batch.position(len(batch.rows))
    if cursor is not None and (filling.rows or filling.rejected):
        yield filling.close(index, cursor, row_index)


def _remember(source: Source, checker: RowChecker, start: SourcePosition, next_row: int) -> None:
    files_from(source.files, start)  # raises a better error if `start`'s own file changed
    if checker.remember(source.ids_until(start)) != next_row:
        # The ids of rows without one would be the numbers of later rows.
        raise InputError(
            f"files before {start.uri} were added, removed or changed since this job began reading "
            "its input; make them as they were, or submit a new job"
        )


def _parts(batches: Iterable[RawBatch]) -> Iterator[RawBatch]:
    for batch in batches:
        yield from batch.parts(ROWS_PER_CHECK)


MOST_TOGETHER = 16
MOST_ROWS_TOGETHER = 8192  # quarantined ones included, so that memory stays bounded
WRITERS = 4


def in_batches(
    planned: Iterable[PlannedGroup], most: int = MOST_TOGETHER
) -> Iterator[list[PlannedGroup]]:
    """Batches of 1, 2, 4, ... `most` groups, fewer if they are large."""
    batch: list[PlannedGroup] = []
    wanted, rows, tokens = 1, 0, 0
    for group in planned:
        batch.append(group)
        rows += len(group.rows) + len(group.rejected)
        tokens += group.prompt_tokens
        if len(batch) >= wanted or rows >= MOST_ROWS_TOGETHER or tokens >= MAX_GROUP_TOKENS:
            yield batch
            wanted = min(2 * wanted, most)
            batch, rows, tokens = [], 0, 0
    if batch:
        yield batch


def write_groups(
    objects: Objects,
    job: JobRow,
    batch: Sequence[PlannedGroup],
    first_stage: Callable[[int], Stage],
    writers: Executor,
    most_tokens: Callable[[PromptRow], int],  # of a row's samples, prompts included
) -> list[NewGroup]:
    """Write the prompts file of each group that has rows. Raises `ObjectError`."""

    def write(planned: PlannedGroup) -> NewGroup:
        name = f"prompts-{planned.index:08d}.arrow"
        artefact = put_own(objects, job, name, write_prompts(planned.rows))
        bounds = [most_tokens(row) for row in planned.rows]
        return NewGroup(
            index=planned.index,
            source=planned.source,
            rows=len(planned.rows),
            prompt_tokens=planned.prompt_tokens,
            prompts=artefact,
            first_stage=first_stage(planned.index),
            most_tokens=sum(bounds),
            most_row_tokens=max(bounds),
        )

    return list(writers.map(carried(write), (planned for planned in batch if planned.rows)))
