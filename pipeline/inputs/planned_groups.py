"""Planned groups on their way into the store: a few in a transaction, their files side by side.

The first group goes alone, so that a verifier starts at once; the next two together, then four, and
so on. A long input takes a sixteenth of the transactions, and waits for a file's sync (or an
upload) while others are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor

from specbatch.pipeline.inputs.planner import MAX_GROUP_TOKENS, PlannedGroup
from specbatch.pipeline.storage.artefacts import write_prompts
from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.storage.workspace import put_own
from specbatch.schemas.records import JobRow, NewGroup, Stage

MOST_TOGETHER = 16
MOST_ROWS_TOGETHER = 8192  # quarantined ones too: what is held in memory stays bounded
WRITERS = 4


def in_batches(
    planned: Iterable[PlannedGroup], most: int = MOST_TOGETHER
) -> Iterator[list[PlannedGroup]]:
    """1, 2, 4, ... `most` groups, fewer where they are large."""
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
) -> list[NewGroup]:
    """The groups with rows, each with its prompts file in the workspace. Raises `ObjectError`."""

    def write(planned: PlannedGroup) -> NewGroup:
        name = f"prompts-{planned.index:08d}.arrow"
        artefact = put_own(objects, job, name, write_prompts(planned.rows))
        return NewGroup(
            index=planned.index,
            source=planned.source,
            rows=len(planned.rows),
            prompt_tokens=planned.prompt_tokens,
            prompts=artefact,
            first_stage=first_stage(planned.index),
        )

    return list(writers.map(write, (planned for planned in batch if planned.rows)))
