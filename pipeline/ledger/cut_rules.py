"""When a group is cut in two, where, and what both parts get. Pure: no SQL, no clock.

A group is a slice of its prompts file. The first part keeps the group's index, the rest gets a new
one; together they are the rows that the group had. Two things cut groups: work that its workers
die of, so that one row does not take its neighbours along, and workers that have nothing to do.
"""

from __future__ import annotations

from dataclasses import dataclass

from specbatch.schemas.records import Stage

CUT_AT = (Stage.VERIFY, Stage.RECORD)  # drafts are only hints: at PROPOSE nothing is worth a cut
# Of one job. A poisoned row of a group of 64 takes 6 cuts; what spoils row after row is no row's
# fault, and may not grow the store without end: further groups fail whole.
MOST_CUTS = 4096


@dataclass(frozen=True, slots=True)
class Slice:
    """A group's rows: which of the prompts file's they are."""

    row_start: int
    rows: int
    prompt_tokens: int

    @property
    def row_stop(self) -> int:
        return self.row_start + self.rows


def cut(whole: Slice, keep: int) -> tuple[Slice, Slice]:
    """The first `keep` rows and the others; they share the prompt tokens by their rows.

    Raises `ValueError` unless both parts have rows.
    """
    if not 0 < keep < whole.rows:
        raise ValueError(f"a group of {whole.rows} rows cannot be cut behind its first {keep}")
    tokens = whole.prompt_tokens * keep // whole.rows
    return (
        Slice(whole.row_start, keep, tokens),
        Slice(whole.row_start + keep, whole.rows - keep, whole.prompt_tokens - tokens),
    )


def half(rows: int) -> int:
    """How many rows stay in the first half."""
    return (rows + 1) // 2


def ends_in_halves(
    stage: Stage, to: Stage, rows: int, *, cancelled: bool, whole: bool, groups_cut: int
) -> bool:
    """Whether a group that would go from `stage` to `to` is cut in two instead.

    `whole`: the reason of its last failure is known to lie with no single row.
    """
    if to is not Stage.FAILED or cancelled or whole:
        return False
    return stage in CUT_AT and rows > 1 and groups_cut < MOST_CUTS


def attempts_spent(rows: int, max_attempts: int) -> int:
    """Of a half at its birth: one attempt is left, or all of them if it is a single row."""
    return 0 if rows == 1 else max(max_attempts - 1, 0)


def is_suspect(attempts: int, rows: int, failed_part: bool, max_attempts: int) -> bool:
    """Whether a group, before its next attempt, may be what its workers died of.

    Of these a worker holds one at a time: if it dies again, it is clear of which. They are on their
    last attempt, or single rows of what failed before. `failed_part`: it was cut, and has failed,
    whole or since.
    """
    last = attempts >= max_attempts - 1
    return (attempts > 0 and last) or (failed_part and (last or rows == 1))
