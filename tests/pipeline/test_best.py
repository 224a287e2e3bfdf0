"""Of a prompt's completions the best ones are published."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from end_to_end.test_drafting import ROWS, Night
from ledger.builders import completion

from specbatch.pipeline.ledger.rules import group_totals
from specbatch.pipeline.outputs.best import best_of_each
from specbatch.schemas.records import CompletionRecord, FinishReason


def sample(number: int, *logprobs: float, row: int = 0, **values: Any) -> CompletionRecord:
    return completion(row, number, logprobs=logprobs, **{"score": None, **values})


BAD: dict[str, Any] = {"finish_reason": FinishReason.ERROR, "error": "failed"}


def kept(rows: list[CompletionRecord], keep: int | None) -> list[tuple[int, int]]:
    return [(r.row_index, r.sample_index) for r in best_of_each(rows, keep)]


def test_the_likeliest_are_kept_in_the_order_of_samples() -> None:
    rows = [sample(0, -2.0), sample(1, -1.0, -1.5), sample(2, -9.0), sample(3, -0.5)]
    rows += [sample(0, -3.0, row=1), sample(1, -2.0, row=1)]
    assert kept(rows, 1) == [(0, 3), (1, 1)]
    assert kept(rows, 2) == [(0, 1), (0, 3), (1, 0), (1, 1)]
    assert kept(rows, None) == kept(rows, 9) == [(r.row_index, r.sample_index) for r in rows]


def test_length_does_not_count_and_the_first_of_equals_wins() -> None:
    rows = [sample(0, -1.0, -1.0, -1.0), sample(1, -1.0)]
    assert kept(rows, 1) == [(0, 0)]


@pytest.mark.parametrize("logprobs", [(), (math.nan,), (-1.0, -math.inf)], ids=str)
def test_what_has_no_mean_is_last_of_those_that_have_not_failed(
    logprobs: tuple[float, ...],
) -> None:
    rows = [sample(0, *logprobs), sample(1, -50.0), sample(2, -0.1, **BAD)]
    assert kept(rows, 1) == [(0, 1)]
    assert kept(rows, 2) == [(0, 0), (0, 1)]


def test_a_malformed_completion_is_kept_only_where_others_are_too_few() -> None:
    malformed = {"error": "bad_output: cut", "finish_reason": FinishReason.LENGTH}
    rows = [sample(0, -0.1, **malformed), sample(1, -5.0), sample(2, -0.2, **malformed)]
    assert kept(rows, 1) == [(0, 1)]
    assert kept(rows, 2) == [(0, 0), (0, 1)]


def test_a_score_goes_before_log_probabilities_and_what_has_none_behind() -> None:
    rows = [
        sample(0, -0.1),
        sample(1, -9.0, score=0.25),
        sample(2, -0.2),
        sample(3, -9.0, score=-3.0),
        sample(4, -8.0, score=0.25),
        sample(5, -0.1, score=0.9, **BAD),
        sample(6, -0.1, score=0.9, finish_reason=FinishReason.BLOCKED),
        sample(7, -8.0, score=0.25),
    ]
    order = [4, 7, 1, 3, 0, 2, 5, 6]
    for keep in range(1, 9):
        assert kept(rows, keep) == [(0, i) for i in sorted(order[:keep])], keep


@pytest.mark.parametrize(("keep", "failed"), [(None, 3), (1, 1), (2, 2), (3, 3)])
def test_a_row_has_failed_where_a_published_completion_has(keep: int | None, failed: int) -> None:
    bad = {0: 0, 1: 1, 2: 2, 3: 3}  # row: how many of its three completions have failed
    rows = [
        sample(i, -1.0, row=row, **(BAD if i < count else {}))
        for row, count in bad.items()
        for i in range(3)
    ]
    assert group_totals(rows, keep)["rows_failed"] == failed


def test_a_job_publishes_the_best_and_the_store_has_all(tmp_path: Path) -> None:
    night = Night(tmp_path)
    with night.worker(draft=None):
        sampling = {"n": 4, "temperature": 0.9, "logprobs": False}
        done = night.run(sampling=sampling, keep_best=2)
    night.store.close()
    records = done.completions
    assert len(records) == 4 * ROWS
    output = pq.read_table(tmp_path / "out-1" / "data").to_pylist()
    found = [(row["row_index"], row["sample_index"], row["text"]) for row in output]
    best = list(best_of_each(records, 2))
    assert found == [(r.row_index, r.sample_index, r.text) for r in best]
    assert len(found) == 2 * ROWS
    assert {row["logprobs"] for row in output} == {None}
