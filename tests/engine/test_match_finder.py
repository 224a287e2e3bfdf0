"""The longest match is the one that comparing everything finds, however the list grew."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbatch.pipeline.engines.proposers.ngram import (
    LONGEST_MATCH,
    LONGEST_REPEAT,
    MatchFinder,
)

Pieces = list[list[int]]


def longest_match(tokens: list[int]) -> tuple[int, int]:
    """(place, length): the most recent of the longest; (0, 0) if even pairs have none."""
    now = len(tokens)
    for length in range(now - 1, 1, -1):
        for place in range(now - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[now - length :]:
                return place, length
    return 0, 0


def grown(pieces: Pieces) -> tuple[MatchFinder, list[int]]:
    tokens: list[int] = []
    finder = MatchFinder(tokens)
    for piece in pieces:
        tokens += piece
        finder.update()
    return finder, tokens


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=12))
def test_it_finds_what_comparing_everything_finds(pieces: Pieces) -> None:
    tokens: list[int] = []
    finder = MatchFinder(tokens)
    for piece in pieces:
        tokens += piece
        finder.update()
        assert (finder.at, finder.length) == longest_match(tokens)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=12),
    st.integers(1, 80),
)
def test_a_draft_is_the_place_read_on_as_if_it_came_true(pieces: Pieces, count: int) -> None:
    finder, tokens = grown(pieces)
    draft = finder.draft(count)
    if not finder.at:
        assert draft == []
        assert finder.available == 0
        return
    written = [*tokens, *draft]
    assert len(draft) == count
    assert draft == [written[finder.at + i] for i in range(count)]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        pytest.param([1, 2, 1, 2], [1, 2, 1, 2, 1, 2], id="a pair twice"),
        pytest.param([7, 7, 7], [7] * 6, id="one token over and over"),
        pytest.param([9, 1, 2, 3, 1, 2, 3], [1, 2, 3, 1, 2, 3], id="three tokens twice"),
    ],
)
def test_what_repeats_itself_goes_on_repeating(tokens: list[int], expected: list[int]) -> None:
    finder, _ = grown([tokens])
    assert finder.available == LONGEST_REPEAT
    assert finder.draft(6) == expected


def test_what_occurred_once_is_offered_up_to_the_end() -> None:
    finder, _ = grown([[1, 2, 3, 4, 5, 1, 2]])
    assert finder.available == 5
    assert finder.draft(5) == [3, 4, 5, 1, 2]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 1], [1, 2, 3, 4], [1, 2, 3, 1]], ids=str)
def test_without_an_earlier_pair_nothing_is_offered(tokens: list[int]) -> None:
    finder, _ = grown([tokens])
    assert (finder.available, finder.length, finder.draft(3)) == (0, 0, [])


@pytest.mark.parametrize(("between", "length"), [(50, 3), (100, 2)])
def test_only_the_most_recent_places_are_looked_at(between: int, length: int) -> None:
    tokens = [5, 1, 2, *(t for i in range(between) for t in (10 + i, 1, 2)), 5, 1, 2]
    finder, _ = grown([tokens])
    assert finder.length == length
    assert finder.at == (3 if length == 3 else len(tokens) - 3)


def test_of_matches_beyond_telling_apart_the_most_recent_wins() -> None:
    phrase = list(range(LONGEST_MATCH))
    tokens = [500, *phrase, 600, 501, *phrase, 601, 500, *phrase]
    finder, _ = grown([tokens])
    assert finder.length == LONGEST_MATCH
    assert finder.draft(1) == [601]


def test_the_index_grows_with_the_list_and_no_faster() -> None:
    finder, tokens = grown([[i % 7, i % 5, i % 3] for i in range(1000)])
    tokens.append(10_000)
    finder.update()
    assert len(finder._earlier) == len(tokens)
    assert len(finder._latest) <= len(tokens)
