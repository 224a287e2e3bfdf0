"""The index finds what comparing everything finds, within its memory, and survives a file."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from engine.replaying import text
from hypothesis import given, settings
from hypothesis import strategies as st

from specbatch.pipeline.engines.contract import Match
from specbatch.pipeline.engines.proposers.suffix_index import (
    _HEADER,
    _KIND,
    LONGEST_CONTEXT,
    SuffixIndex,
    seal,
    unseal,
)

Outputs = list[list[int]]
PLENTY = 10_000

few_tokens = st.lists(st.integers(0, 2), max_size=12)


def starts_of(outputs: Outputs) -> list[int]:
    """Where each output begins in the row that positions count in."""
    starts = [0]
    for output in filter(None, outputs):
        starts.append(starts[-1] + len(output) + 1)
    return starts


def places_behind(outputs: Outputs, context: list[int]) -> dict[int, int]:
    """position: token there, for all places behind `context`."""
    held = [output for output in outputs if output]
    return {
        start + end: output[end]
        for start, output in zip(starts_of(outputs), held, strict=False)
        for end in range(len(context), len(output))
        if output[end - len(context) : end] == context
    }


def longest_known(outputs: Outputs, context: list[int]) -> tuple[int, dict[int, int]]:
    for length in range(min(len(context), LONGEST_CONTEXT), 0, -1):
        if places := places_behind(outputs, context[-length:]):
            return length, places
    return 0, {}


def check(outputs: Outputs, context: list[int], index: SuffixIndex) -> None:
    length, places = longest_known(outputs, context)
    found = index.find(context)
    if not length:
        assert found is None
        return
    assert found is not None
    assert found.length == length
    votes = Counter(places.values())
    token = places[found.position]
    assert votes[token] == max(votes.values())
    assert found.share == votes[token] / len(places)
    assert found.position == min(p for p, t in places.items() if t == token)
    assert index.find(context, length) == found
    assert index.find(context, length + 1) is None


@settings(max_examples=300, deadline=None)
@given(st.lists(few_tokens, max_size=6), st.lists(st.integers(0, 3), max_size=8))
def test_it_finds_what_comparing_everything_finds(outputs: Outputs, context: list[int]) -> None:
    check(outputs, context, SuffixIndex.build(outputs, PLENTY))


@pytest.mark.parametrize("seed", range(3))
def test_long_contexts_are_found_too(seed: int) -> None:
    generator = random.Random(seed)
    phrase = text(60, seed)
    outputs = [
        [*text(5, i), *phrase[generator.randrange(20) : generator.randrange(25, 60)], 300 + i]
        for i in range(40)
    ]
    index = SuffixIndex.build(outputs, PLENTY)
    for end in range(1, 60):
        check(outputs, phrase[:end], index)
        check(outputs, [299, *phrase[10:end]], index)


def test_a_match_never_crosses_from_one_output_to_the_next() -> None:
    index = SuffixIndex.build([[1, 2, 3], [4, 5, 6]], PLENTY)
    assert index.find([2, 3, 4]) == Match(length=1, position=5, share=1.0)
    assert index.find([2, 3]) is None, "nothing follows the end"
    assert index.follow(1, 10) == [2, 3]
    assert index.follow(4, 2) == [4, 5]
    assert index.follow(6, 3) == [6]


@pytest.mark.parametrize("context", [[], [99], [-1], [2**31], [5, 99], [2**40, 99]], ids=str)
def test_an_unknown_context_is_no_match(context: list[int]) -> None:
    index = SuffixIndex.build([[1, 2, 3], [0, 0, 5]], PLENTY)
    assert index.find(context) is None
    assert SuffixIndex.build([], PLENTY).find(context) is None


def test_what_stands_behind_an_unknown_token_is_matched() -> None:
    index = SuffixIndex.build([[1, 2, 3, 4]], PLENTY)
    for unknown in (99, 2**31, 2**40, -5):
        assert index.find([1, unknown, 2, 3]) == Match(2, 3, 1.0)


def test_the_majority_of_many_is_followed() -> None:
    outputs = [[7, 8, 9, token, i] for i, token in enumerate([1, 2, 2] * 400)]
    found = SuffixIndex.build(outputs, PLENTY).find([7, 8, 9])
    assert found is not None
    assert found.length == 3
    assert outputs[found.position // 6][3] == 2
    assert found.position % 6 == 3
    assert found.share == pytest.approx(2 / 3, abs=0.2)  # 64 of them are looked at, at most


@pytest.mark.parametrize("before", [0, 201, 1001, 2001, 2399])
def test_all_of_many_are_counted_wherever_the_context_would_stand(before: int) -> None:
    outputs = [[2 * i, 7, 8, 9, 1 + i // 600, 5] for i in range(1200)]
    found = SuffixIndex.build(outputs, PLENTY).find([before, 7, 8, 9])
    assert found is not None
    assert found.length == (3 if before else 4)
    assert found.share == pytest.approx(0.5 if before else 1.0, abs=0.1)


def test_memory_is_bounded_and_the_first_outputs_are_kept() -> None:
    outputs = [text(100, seed) for seed in range(50)]
    index = SuffixIndex.build(iter(outputs), 1050)
    assert index.num_tokens == 1050
    assert len(index) == 11
    assert [index.output(i) for i in range(10)] == [tuple(o) for o in outputs[:10]]
    assert index.output(10) == tuple(outputs[10][:50])
    assert index.find(outputs[11][:20], 20) is None
    arrays = [v for name in index.__dict__ if isinstance(v := getattr(index, name), np.ndarray)]
    held = len(index._reverse) + sum(array.nbytes for array in arrays)
    assert held <= 12 * 1050 + 16 * 11 + 4 * LONGEST_CONTEXT + 4


def test_empty_outputs_are_left_out_and_short_ones_held() -> None:
    index = SuffixIndex.build([[], [4], [], [5, 6]], PLENTY)
    assert [index.output(i) for i in range(len(index))] == [(4,), (5, 6)]
    assert index.find([4]) is None
    assert index.find([5]) == Match(1, 3, 1.0)


@pytest.mark.parametrize("outputs", [[[1, -1]], [[2**31 - 1]]], ids=str)
def test_tokens_that_cannot_be_are_refused(outputs: Outputs) -> None:
    with pytest.raises(ValueError, match="token"):
        SuffixIndex.build(outputs, PLENTY)


@pytest.mark.parametrize("most", [-1, 2**29])
def test_bounds_that_cannot_be_are_refused(most: int) -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        SuffixIndex.build([], most)


@settings(max_examples=60, deadline=None)
@given(st.lists(few_tokens, max_size=6), st.lists(st.integers(0, 3), max_size=8))
def test_a_loaded_index_is_the_one_that_was_saved(outputs: Outputs, context: list[int]) -> None:
    index = SuffixIndex.build(outputs, PLENTY)
    data = index.to_bytes()
    loaded = SuffixIndex.from_bytes(data)
    assert loaded.to_bytes() == data
    assert len(data) <= 8 * (index.num_tokens + len(index)) + 100
    assert loaded.find(context) == index.find(context)
    assert [loaded.output(i) for i in range(len(loaded))] == [tuple(o) for o in outputs if o]


def test_anything_else_is_no_saved_index() -> None:
    data = SuffixIndex.build([text(20)], PLENTY).to_bytes()
    changed = [bytes([*data[:i], data[i] ^ 1, *data[i + 1 :]]) for i in range(len(data))]
    for wrong in (b"", data[:-1], data + b"0", data[:10], b"x" * len(data), *changed):
        with pytest.raises(ValueError, match=r"kind|checksum"):
            SuffixIndex.from_bytes(wrong)


@pytest.mark.parametrize(
    ("tokens", "row", "offsets"),
    [
        pytest.param(3, [1, 2, 3], [4], id="no separator at the end"),
        pytest.param(3, [1, -2, -1], [4], id="a token below the separator"),
        pytest.param(3, [1, 2, -1], [0], id="a place behind the row"),
        pytest.param(3, [1, 2, -1], [16], id="a place before the row"),
        pytest.param(3, [1, 2, -1], [6], id="a place within a token"),
        pytest.param(9, [1, 2, -1], [8], id="another length"),
    ],
)
def test_a_sealed_but_wrong_index_is_refused(
    tokens: int, row: list[int], offsets: list[int]
) -> None:
    header = _HEADER.pack(tokens, len(offsets))
    data = seal(_KIND, header, np.array([*row, *offsets], "<i4").tobytes())
    with pytest.raises(ValueError, match="a suffix index"):
        SuffixIndex.from_bytes(data)
    with pytest.raises(ValueError, match="header"):
        SuffixIndex.from_bytes(seal(_KIND, b"short"))


def test_a_seal_tells_kinds_apart() -> None:
    assert bytes(unseal(b"one", seal(b"one", b"a", b"b"))) == b"ab"
    with pytest.raises(ValueError, match="kind"):
        unseal(b"two", seal(b"one", b"a"))
