"""Grids: few points by default, and nothing of the whole is lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.grids import covering, pairwise

pytestmark = pytest.mark.unit


@settings(max_examples=30, derandomize=True, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_any_two_axes_take_all_pairs_of_their_values(sizes: list[int]) -> None:
    few = covering([range(size) for size in sizes])
    for one, other in itertools.combinations(range(len(sizes)), 2):
        pairs = {(point[one], point[other]) for point in few}
        assert pairs == set(itertools.product(range(sizes[one]), range(sizes[other])))


def test_a_grid_has_every_combination_and_what_is_no_pair_is_long() -> None:
    @pairwise(rows=[1, 7, 63], dtype=["float32", "bfloat16"], params={"greedy": 0.0, "warm": 0.8})
    def test() -> None:
        """Never run."""

    (mark,) = test.pytestmark  # type: ignore[attr-defined]  # what pytest writes there
    names, cases = mark.args
    assert names == ("rows", "dtype", "params")
    assert len({case.values for case in cases}) == 12
    by_default = [case for case in cases if not case.marks]
    assert len(by_default) == 6
    assert by_default[0].id == "rows=1-float32-greedy"
