"""Where groups are split, and which of them may kill workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger.builders import new_group

from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.split_rules import (
    SPLIT_AT,
    Slice,
    attempts_spent,
    ends_in_halves,
    half,
    is_suspect,
    split,
)
from specbatch.schemas.errors import StoreError
from specbatch.schemas.records import FIRST_SPLIT_INDEX, Stage

SLICES = st.builds(
    Slice,
    row_start=st.integers(0, 1000),
    rows=st.integers(2, 4096),
    prompt_tokens=st.integers(0, 1 << 40),
)


@given(whole=SLICES, data=st.data())
def test_both_parts_together_are_the_whole(whole: Slice, data: st.DataObject) -> None:
    first, rest = split(whole, data.draw(st.integers(1, whole.rows - 1)))
    assert (first.row_start, rest.row_stop) == (whole.row_start, whole.row_stop)
    assert first.row_stop == rest.row_start
    assert first.prompt_tokens + rest.prompt_tokens == whole.prompt_tokens
    assert min(first.rows, rest.rows) > 0
    assert min(first.prompt_tokens, rest.prompt_tokens) >= 0


@pytest.mark.parametrize("keep", [-1, 0, 5, 6])
def test_no_part_may_be_empty(keep: int) -> None:
    with pytest.raises(ValueError, match="cannot be split after its first"):
        split(Slice(3, 5, 50), keep)


@given(rows=st.integers(1, 4096))
def test_halving_comes_to_single_rows_soon(rows: int) -> None:
    cuts = 0
    while rows > 1:
        rows, cuts = max(half(rows), rows - half(rows)), cuts + 1
    assert cuts <= 12


@pytest.mark.parametrize(
    ("stage", "to", "rows", "cancelled", "whole", "expected"),
    [
        (Stage.VERIFY, Stage.FAILED, 2, False, False, True),
        (Stage.RECORD, Stage.FAILED, 64, False, False, True),
        (Stage.VERIFY, Stage.FAILED, 1, False, False, False),  # a row fails by itself
        (Stage.VERIFY, Stage.VERIFY, 64, False, False, False),  # it has attempts left
        (Stage.VERIFY, Stage.CANCELLED, 64, True, False, False),
        (Stage.RECORD, Stage.FAILED, 64, True, False, False),  # nobody waits for it
        (Stage.VERIFY, Stage.FAILED, 64, False, True, False),  # the model is missing, say
        (Stage.PROPOSE, Stage.VERIFY, 64, False, False, False),
    ],
)
def test_what_is_cut_instead_of_failing(
    stage: Stage,
    to: Stage,
    rows: int,
    cancelled: bool,
    whole: bool,
    expected: bool,
) -> None:
    found = ends_in_halves(stage, to, rows, cancelled=cancelled, whole=whole)
    assert found is expected
    assert Stage.PROPOSE not in SPLIT_AT


def test_planned_groups_stay_below_the_numbers_of_those_cut_off() -> None:
    last = FIRST_SPLIT_INDEX - 1
    rules.check_order("job", last, [new_group(last)])
    with pytest.raises(StoreError, match="set a larger group_size"):
        rules.check_order("job", last, [new_group(last), new_group(last + 1)])


def test_halves_have_one_attempt_and_single_rows_all() -> None:
    assert [attempts_spent(rows, 3) for rows in (1, 2, 32)] == [0, 2, 2]
    assert [attempts_spent(rows, 1) for rows in (1, 2)] == [0, 0]


@pytest.mark.parametrize(
    ("attempts", "rows", "failed_part", "max_attempts", "expected"),
    [
        (0, 64, False, 3, False),  # new
        (1, 64, False, 3, False),  # it failed once: so did its neighbours, perhaps
        (2, 64, False, 3, True),  # its last attempt
        (0, 64, False, 1, False),  # its only attempt, as of all others
        (2, 32, True, 3, True),  # half of what failed
        (0, 1, True, 3, True),  # a row of what failed
        (0, 1, False, 3, False),  # a row that somebody idle took over
        (0, 32, True, 1, True),
    ],
)
def test_who_is_suspected(
    attempts: int, rows: int, failed_part: bool, max_attempts: int, expected: bool
) -> None:
    assert is_suspect(attempts, rows, failed_part, max_attempts) is expected
