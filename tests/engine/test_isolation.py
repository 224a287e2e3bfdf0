"""Who is at fault is found by halves, whoever and wherever they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbatch.pipeline.engines.state.recovery import isolate


class RowError(Exception):
    pass


class HostError(Exception):
    pass


def attempt_of(bad: set[int], attempts: list[list[int]]) -> Callable[[list[int]], list[int]]:
    def attempt(part: list[int]) -> list[int]:
        attempts.append(part)
        if bad & set(part):
            raise RowError(min(bad & set(part)))
        return part

    return attempt


@given(st.integers(1, 40), st.data())
def test_all_who_raise_alone_are_found_and_all_others_pass_once(
    count: int, data: st.DataObject
) -> None:
    bad = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    attempts: list[list[int]] = []
    passed, raising = isolate(range(count), attempt_of(bad, attempts), lambda _: False)
    assert [member for member, _ in raising] == sorted(bad)
    assert [error.args[0] for _, error in raising] == sorted(bad)
    good = [member for part in passed for member in part]
    assert good == [member for member in range(count) if member not in bad]
    assert len(attempts) <= 2 * len(bad) * max(1, (count - 1).bit_length())


def test_what_nobody_is_to_blame_for_is_raised_on_at_once() -> None:
    attempts: list[list[int]] = []

    def attempt(part: list[int]) -> None:
        attempts.append(part)
        raise HostError

    with pytest.raises(HostError):
        isolate(range(8), attempt, lambda e: isinstance(e, HostError))
    assert attempts == [[0, 1, 2, 3]]
