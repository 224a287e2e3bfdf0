"""What is packed comes back, and fits what it is packed into."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specbatch.schemas.provenance import by_depth
from specbatch.schemas.token_arrays import Numbers, Origins, Repeated, Steps, TokenArray

SMALL = st.lists(st.sampled_from([0, 0, 0, 1, 4, 32_767]))
SMALLINT = range(-32_768, 32_768)


def packed(kind: TokenArray, values: list[int]) -> list[int]:
    """Packed, after a look at whether it is what it was when it is unpacked."""
    found = list(kind.packed(values))
    assert list(kind.unpacked(found)) == values
    return found


@given(SMALL)
def test_repeated_numbers_come_back(values: list[int]) -> None:
    assert all(code in SMALLINT for code in packed(Repeated(), values))


@given(st.lists(st.sampled_from([0, 1, 1, 2, 3])))
def test_origins_come_back_even_where_no_engine_gives_them(values: list[int]) -> None:
    assert all(code in SMALLINT for code in packed(Origins(), values))


@given(st.sets(st.integers(0, 60)))
def test_steps_come_back(values: set[int]) -> None:
    packed(Steps(), sorted(values))


@given(st.lists(st.integers(0, 9) | st.sampled_from([32_767, 32_768, 2**30, 2**31, 2**45 + 7])))
def test_numbers_of_any_size_come_back(values: list[int]) -> None:
    assert all(digit in SMALLINT for digit in packed(Numbers(), values))


def test_what_is_usual_takes_little() -> None:
    assert packed(Origins(), [0] * 40_000) == [0, -32_768, -7231]
    assert packed(Origins(), [1, 1, 2, 1, 1, 2, 0, 1]) == [10, -1, 0, 1]
    assert packed(Steps(), [5, 6, 7, 9]) == [5, 3, 9, 1]
    assert packed(Numbers(), [70, 40_000]) == [70, -2, 7232]
    assert packed(Numbers(), [2**30]) == [-2, -1, 0]


def test_depths_follow_from_origins_and_drafts() -> None:
    assert by_depth((0, 1, 1, 2, 1, 3, 0, 2), (3, 1, 2)) == ((3, 2, 1), (2, 1, 0))
    assert by_depth((1, 1), (4,)) == ((1, 1, 1, 1), (1, 1, 0, 0)), "ended inside of a draft"
    assert by_depth((0, 0), ()) == ((), ())
