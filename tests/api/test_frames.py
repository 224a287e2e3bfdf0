"""Frames: what is written of them, and how completions come back to their rows."""

from __future__ import annotations

import io
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from api.conftest import LIBRARIES, columns_of, frame_of

from specbatch.jobs.api.frames import (
    check_frame,
    columns_for,
    library_of,
    parquet_of,
    with_completions,
)
from specbatch.schemas import arrow
from specbatch.schemas.errors import InputError
from specbatch.schemas.spec import InputSpec

SPEC = InputSpec(uri="x")


def completions(rows: list[dict[str, Any]]) -> pa.Table:
    """An output's rows; what is not given is null, or 0 where it must not be."""
    whole = [{"sample_index": 0, "finish_reason": "length"} | row for row in rows]
    return pa.Table.from_pylist(whole, schema=arrow.OUTPUT)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_frame_is_known_by_its_library(library: str) -> None:
    assert library_of(frame_of(library, {"prompt": ["a"]})) == library


def test_a_frame_of_a_subclass_is_one_of_its_library() -> None:
    class Mine(pd.DataFrame):
        pass

    assert library_of(Mine({"prompt": ["a"]})) == "pandas"


def test_what_is_no_frame_is_refused_with_what_to_give() -> None:
    with pytest.raises(InputError, match="data is of type list: give a pandas or polars DataFrame"):
        library_of(["a prompt"])
    with pytest.raises(InputError, match=r"`collect\(\)`"):
        library_of(pl.LazyFrame({"prompt": ["a"]}))


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_missing_column_and_a_frame_without_rows_are_refused(library: str) -> None:
    frame = frame_of(library, {"text": ["a"], "label": [1]})
    with pytest.raises(InputError, match="no column `prompt`; its columns are text, label"):
        check_frame(frame, SPEC)
    with pytest.raises(InputError, match="no column `own`"):
        check_frame(frame, InputSpec(uri="x", prompt_column="text", sampling_column="own"))
    with pytest.raises(InputError, match="no rows"):
        check_frame(frame_of(library, {"prompt": []}), SPEC)


def test_a_column_that_occurs_twice_is_refused() -> None:
    frame = pd.DataFrame([["a", "b"]], columns=["prompt", "prompt"])
    with pytest.raises(InputError, match="2 columns `prompt`"):
        check_frame(frame, SPEC)


@pytest.mark.parametrize("library", LIBRARIES)
def test_only_the_columns_that_a_job_reads_are_written(library: str) -> None:
    frame = frame_of(
        library, {"n": [1, 2], "prompt": ["a", "b"], "id": ["x", "y"], "tag": ["t", "u"]}
    )
    columns = columns_for(frame, SPEC)
    written = pq.read_table(io.BytesIO(parquet_of(frame, library, columns)))
    assert written.to_pydict() == {"prompt": ["a", "b"], "id": ["x", "y"], "tag": ["t", "u"]}
    whole = pq.read_table(io.BytesIO(parquet_of(frame, library, None)))
    assert whole.column_names == ["n", "prompt", "id", "tag"]
    assert parquet_of(frame, library, columns) == parquet_of(frame, library, columns)


def test_what_parquet_cannot_hold_is_an_input_error() -> None:
    frame = pd.DataFrame({"prompt": ["a", 1]})
    with pytest.raises(InputError, match=r"column .* give each column values of one type"):
        parquet_of(frame, "pandas", ["prompt"])
    with pytest.raises(InputError, match="column name 0 of the data is not text"):
        parquet_of(pd.DataFrame({"prompt": ["a"], 0: [1]}), "pandas", None)


@pytest.mark.parametrize("library", LIBRARIES)
def test_completions_stand_behind_the_columns_of_their_rows(library: str) -> None:
    frame = frame_of(library, {"prompt": ["a", "b", "c"], "label": [3, 1, 2]})
    done = with_completions(
        frame,
        library,
        completions(
            [
                {"row_index": 0, "text": "A", "prompt_tokens": 4},
                {"row_index": 1, "finish_reason": "error", "error": "bad: it is"},
                {"row_index": 2, "text": "C", "prompt_tokens": 6},
            ]
        ),
        "cancelled: no",
    )
    assert library_of(done) == library
    found = columns_of(done)
    added = [name for name in arrow.OUTPUT.names if name not in ("id", "row_index")]
    assert list(found) == ["prompt", "label", *added]
    assert found["prompt"] == ["a", "b", "c"]
    assert found["label"] == [3, 1, 2]
    assert found["text"] == ["A", None, "C"]
    assert found["error"] == [None, "bad: it is", None]
    assert found["prompt_tokens"] == [4, None, 6]
    assert columns_of(frame) == {"prompt": ["a", "b", "c"], "label": [3, 1, 2]}


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_row_comes_once_for_each_sample(library: str) -> None:
    frame = frame_of(library, {"prompt": ["a", "b"]})
    rows = [{"row_index": r, "sample_index": s, "text": f"{r}{s}"} for r in (0, 1) for s in (0, 1)]
    found = columns_of(with_completions(frame, library, completions(rows), ""))
    assert found["prompt"] == ["a", "a", "b", "b"]
    assert found["text"] == ["00", "01", "10", "11"]
    assert found["sample_index"] == [0, 1, 0, 1]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_row_that_a_stopped_job_left_says_so(library: str) -> None:
    frame = frame_of(library, {"prompt": ["a", "b", "c"]})
    done = completions([{"row_index": 1, "text": "B"}])
    found = columns_of(with_completions(frame, library, done, "cancelled: enough"))
    assert found["prompt"] == ["a", "b", "c"]
    assert found["text"] == [None, "B", None]
    assert found["error"] == ["cancelled: enough", None, "cancelled: enough"]
    assert found["finish_reason"] == ["cancelled", "length", "cancelled"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_frame_s_own_column_keeps_its_name(library: str) -> None:
    frame = frame_of(library, {"text": ["a"], "error": [0.5], "completion_error": [True]})
    done = completions([{"row_index": 0, "text": "A", "error": "e"}])
    found = columns_of(with_completions(frame, library, done, ""))
    assert (found["text"], found["completion_text"]) == (["a"], ["A"])
    assert (found["error"], found["completion_error"]) == ([0.5], [True])
    assert found["completion_completion_error"] == ["e"]


def test_pandas_keeps_its_index_and_the_types_of_all_columns() -> None:
    index = pd.MultiIndex.from_tuples([("x", 1), ("x", 1), ("y", 2)], names=["a", "b"])
    frame = pd.DataFrame(
        {
            "prompt": ["a", "b", "c"],
            "kind": pd.Categorical(["u", "v", "u"]),
            "span": pd.interval_range(0, 3),
            "things": [{1}, object, None],
            "when": pd.to_datetime(["2026-01-01", None, "2026-01-03"]).tz_localize("UTC"),
        },
        index=index,
    )
    rows = [{"row_index": i, "text": str(i), "prompt_tokens": i} for i in range(3)]
    done = with_completions(frame, "pandas", completions(rows), "")
    pd.testing.assert_frame_equal(done[list(frame.columns)], frame)
    twice = completions([row | {"sample_index": s} for row in rows for s in (0, 1)])
    done = with_completions(frame, "pandas", twice, "")
    assert done.index.tolist() == [("x", 1)] * 4 + [("y", 2)] * 2
    assert done.dtypes["prompt_tokens"] == "Int32"
    assert dict(done.dtypes[list(frame.columns)]) == dict(frame.dtypes)


def test_integers_have_one_type_whether_rows_failed_or_not() -> None:
    frame = pd.DataFrame({"prompt": ["a"]})
    kinds = [
        with_completions(frame, "pandas", completions([{"row_index": 0, **row}]), "").dtypes
        for row in ({"text": "A", "seed": 1}, {"error": "e", "finish_reason": "error"})
    ]
    assert dict(kinds[0]) == dict(kinds[1])


# --- templates -------------------------------------------------------------------------------
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_columns_of_a_template_are_written(library: str) -> None:
    frame = frame_of(library, {"title": ["a"], "body": ["b"], "prompt": ["c"], "more": ["d"]})
    spec = InputSpec(uri="x", template="{title}: {body}")
    check_frame(frame, spec)
    assert columns_for(frame, spec) == ["title", "body"]


def test_a_column_that_a_template_names_must_be_there() -> None:
    frame = frame_of("pandas", {"body": ["b"]})
    with pytest.raises(InputError) as told:
        check_frame(frame, InputSpec(uri="x", template="{bodi}"))
    assert "data has no column `bodi` (did you mean `body`?)" in str(told.value)
