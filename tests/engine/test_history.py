"""A past output is found by its prompt, and a saved history is the same again."""

from __future__ import annotations

import json

import pytest
from engine.replaying import text

from specbatch.pipeline.engines.proposers.history import _HEADER, _KIND, History
from specbatch.pipeline.engines.proposers.suffix_index import SuffixIndex, seal
from specbatch.schemas.speculation import PastOutput

PLENTY = 10_000


def past(row_id: str, tokens: list[int], sample: int = 0, job: str = "last") -> PastOutput:
    return PastOutput(job, row_id, sample, tuple(tokens))


def test_the_first_output_of_a_prompt_and_sample_is_its_past() -> None:
    history = History.build(
        [past("a", [1, 2]), past("a", [3, 4], job="older"), past("a", [5, 6], sample=1)], PLENTY
    )
    assert history.past("a", 0) == (1, 2)
    assert history.past("a", 1) == (5, 6)
    assert len(history) == 2
    assert history.index.find([3]) is not None, "the older one still is in the index"


def test_a_sample_that_is_missing_falls_back_to_the_first() -> None:
    history = History.build([past("a", [1, 2]), past("b", [3, 4], sample=1)], PLENTY)
    assert history.past("a", 7) == (1, 2)
    assert history.past("b", 1) == (3, 4)
    assert history.past("b", 0) == ()
    assert history.past("c", 0) == ()


def test_equal_outputs_are_held_once() -> None:
    same = text(50)
    history = History.build(
        [past(str(i), same, job=str(j)) for j in range(3) for i in range(9)], 99
    )
    assert len(history.index) == 1
    assert history.index.num_tokens == 50
    assert all(history.past(str(i), 0) == tuple(same) for i in range(9))


def test_memory_is_bounded_by_the_tokens_taken() -> None:
    outputs = [past(str(i), text(100, seed=i)) for i in range(50)]
    history = History.build(iter(outputs), 1050)
    assert history.index.num_tokens == 1050
    assert len(history) == 11
    assert history.past("9", 0) == outputs[9].token_ids
    assert history.past("10", 0) == outputs[10].token_ids[:50], "cut, and still a hint"
    assert history.past("11", 0) == ()


def test_an_empty_output_is_no_past() -> None:
    history = History.build([past("a", []), past("b", [1])], PLENTY)
    assert history.past("a", 0) == ()
    assert history.past("b", 0) == (1,)
    assert History.build([], PLENTY).past("a", 0) == ()


def test_a_loaded_history_is_the_one_that_was_saved() -> None:
    rows = ["plain", 'quo"te', "日本", "\ud800", ""]
    outputs = [past(row, text(30, seed=i), sample=i) for i, row in enumerate(rows)]
    history = History.build(outputs, PLENTY)
    loaded = History.from_bytes(history.to_bytes())
    assert [loaded.past(o.row_id, o.sample_index) for o in outputs] == [
        o.token_ids for o in outputs
    ]
    assert loaded.index.find(text(30)[:9]) == history.index.find(text(30)[:9])
    assert loaded.to_bytes() == history.to_bytes()


def test_anything_else_is_no_saved_history() -> None:
    data = History.build([past("a", [1, 2, 3])], PLENTY).to_bytes()
    changed = [bytes([*data[:i], data[i] ^ 1, *data[i + 1 :]]) for i in range(len(data))]
    index = SuffixIndex.build([[1, 2, 3]], PLENTY).to_bytes()
    for wrong in (b"", data[:-1], data + b"0", index, *changed):
        with pytest.raises(ValueError, match=r"kind|checksum"):
            History.from_bytes(wrong)


@pytest.mark.parametrize(
    "keys",
    [[["a", 0, 1]], [["a", 0, -1]], [["a", 0]], [[1, 0, 0]], [["a", "0", 0]], ["a"], 7, {"a": 1}],
    ids=str,
)
def test_a_sealed_but_wrong_history_is_refused(keys: object) -> None:
    encoded = json.dumps(keys).encode()
    index = SuffixIndex.build([[1, 2, 3]], PLENTY).to_bytes()
    with pytest.raises(ValueError, match="a history"):
        History.from_bytes(seal(_KIND, _HEADER.pack(len(encoded)), encoded, index))
    with pytest.raises(ValueError, match="header"):
        History.from_bytes(seal(_KIND, b"short"))
