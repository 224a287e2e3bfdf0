"""When and where a group is split, and what both parts get. Pure: no SQL, no clock.

A group is a slice of its prompts file. The first part keeps the group's index, the rest gets a new
one; together they have the group's rows. Groups are split for two reasons: one row may kill
workers, and must not fail its neighbours; and idle workers take over half of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

from specbatch.schemas.records import Stage

SPLIT_AT = (Stage.VERIFY, Stage.RECORD)  # at PROPOSE a split is not worth it: drafts are hints
# Of one job. A poisoned row in a group of 64 takes 6 splits. What fails row after row is no row's
# fault, and must not grow the store without end: further groups fail whole.
MOST_FAILED_HALVES = 4096


@dataclass(frozen=True, slots=True)
class Slice:
    """A group's rows within its prompts file."""

    row_start: int
    rows: int
    prompt_tokens: int

    @property
    def row_stop(self) -> int:
        return self.row_start + self.rows


def split(whole: Slice, keep: int) -> tuple[Slice, Slice]:
    """The first `keep` rows and the others. Prompt tokens are shared in proportion.

    Raises `ValueError` unless both parts have rows.
    """
    if not 0 < keep < whole.rows:
        raise ValueError(f"a group of {whole.rows} rows cannot be split after its first {keep}")
    tokens = whole.prompt_tokens * keep // whole.rows
    return (
        Slice(whole.row_start, keep, tokens),
        Slice(whole.row_start + keep, whole.rows - keep, whole.prompt_tokens - tokens),
    )


def half(rows: int) -> int:
    """How many rows stay in the first half."""
    return (rows + 1) // 2


def ends_in_halves(stage: Stage, to: Stage, rows: int, *, cancelled: bool, whole: bool) -> bool:
    """Whether a group that would go from `stage` to `to` is split in halves instead.

    `whole`: no single row caused its last failure. The job may have at most `MOST_FAILED_HALVES`.
    """
    if to is not Stage.FAILED or cancelled or whole:
        return False
    return stage in SPLIT_AT and rows > 1


def attempts_spent(rows: int, max_attempts: int) -> int:
    """The attempts that a new half has spent: one is left, or all if it is a single row."""
    return 0 if rows == 1 else max(max_attempts - 1, 0)


def is_suspect(attempts: int, rows: int, failed_part: bool, max_attempts: int) -> bool:
    """Whether a group may kill the worker of its next attempt.

    A worker holds one such group at a time, so that its death points to one. They are on their last
    attempt, or single rows of a group that failed before. `failed_part`: the group was split, and
    failed before or since.
    """
    last = attempts >= max_attempts - 1
    return (attempts > 0 and last) or (failed_part and (last or rows == 1))
