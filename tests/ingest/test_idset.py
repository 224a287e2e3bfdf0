"""Which ids were seen before: exactly what a Python set says."""

from __future__ import annotations

import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from specbatch.pipeline.inputs.rows import IdSet


@settings(derandomize=True, deadline=None)
@given(st.lists(st.lists(st.integers(0, 60).map(str), max_size=20), max_size=20))
def test_it_agrees_with_a_set(batches: list[list[str]]) -> None:
    ours, theirs = IdSet(), set[str]()
    for batch in batches:
        expected = []
        for value in batch:
            expected.append(value in theirs)
            theirs.add(value)
        assert ours.add(batch) == expected
        assert len(ours) == len(theirs)


def test_many_ids_take_eight_bytes_each() -> None:
    tracemalloc.start()
    ids = IdSet()
    for start in range(0, 200_000, 1000):
        assert not any(ids.add([f"row-{i}" for i in range(start, start + 1000)]))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 9 * 200_000
    assert ids.add(["row-0", "row-199999", "row-x"]) == [True, True, False]
