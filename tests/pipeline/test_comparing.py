"""Rows of two jobs are compared by id and sample, whatever their order, in little memory."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbatch.pipeline.operations.comparing import (
    CONTEXT,
    compare,
    difference,
    spec_differences,
)
from specbatch.pipeline.outputs.rows import ComparedRow, compared
from specbatch.schemas.records import JobRow, JobState, Stage
from support.peak_memory import told_peaks

COMPARING = Path(__file__).with_name("comparing_memory.py")


def row(number: int, **values: Any) -> ComparedRow:
    """A completion of two tokens; `values` of the output's columns."""
    columns = {
        "id": f"row-{number}",
        "row_index": number,
        "sample_index": 0,
        "text": f"text {number}",
        "token_ids": [number, number + 1],
        "finish_reason": "stop",
        "error": None,
        "logprobs": None,
    }
    return compared(columns | values)


def rows(count: int) -> list[ComparedRow]:
    return [row(number) for number in range(count)]


def test_equal_rows_are_equal_in_any_order() -> None:
    shuffled = rows(500)
    random.Random(3).shuffle(shuffled)
    for other in (rows(500), shuffled, rows(500)[::-1]):
        found = compare(rows(500), other)
        assert found.equal
        assert found.same == 500


def test_a_row_more_in_one_job_moves_no_other() -> None:
    found = compare(rows(20), [row(99), *rows(20)[:7], *rows(20)[8:]])
    assert (found.same, found.differ, found.only_left, found.only_right) == (19, 0, 1, 1)
    assert (found.ids_only_left, found.ids_only_right) == (["row-7"], ["row-99"])
    assert not found.equal


def test_samples_and_rows_without_an_id_are_told_apart() -> None:
    samples = [row(1, sample_index=sample, token_ids=[sample]) for sample in (0, 1)]
    assert compare(samples, samples[::-1]).equal
    refused = [row(number, id=None, error="null_prompt: it is null") for number in (3, 4)]
    assert compare(refused, refused[::-1]).equal
    # A row whose id is that of another row's number is another row.
    assert compare([row(3, id=None)], [row(0, id="3")]).same == 0


def test_rows_of_one_id_belong_together_in_their_order() -> None:
    """As rows that were refused because their id is doubled have it."""
    doubled = [row(0, id="a"), row(1, id="a", error="doubled_id: it is"), row(2, id="b")]
    assert compare(doubled, doubled).equal
    assert compare(doubled, [doubled[2], *doubled[:2]]).equal


@pytest.mark.parametrize(
    ("values", "what", "at", "left", "right"),
    [
        ({"token_ids": [5, 9]}, "token", 1, 6, 9),
        ({"token_ids": [5, 6, 7]}, "token", 2, None, 7),
        ({"token_ids": None, "text": "text 5!"}, "character", 6, None, "!"),
        ({"text": "next 5"}, "character", 0, "t", "n"),
        ({"finish_reason": "length"}, "finish_reason", None, "stop", "length"),
        ({"error": "too_long: it is"}, "error", None, None, "too_long: it is"),
        ({"token_ids": None, "text": None}, "text", None, "text 5", None),
    ],
)
def test_the_first_difference_is_named(
    values: dict[str, Any], what: str, at: int | None, left: Any, right: Any
) -> None:
    found = difference(row(5), row(5, **values))
    assert found is not None
    assert (found.what, found.at, found.left, found.right) == (what, at, left, right)
    back = difference(row(5, **values), row(5))
    assert back is not None
    assert (back.left, back.right) == (right, left)


def test_texts_are_shown_from_where_they_differ_and_cut() -> None:
    one, other = (row(0, text="same " + letter * 99, token_ids=[ord(letter)]) for letter in "ab")
    found = difference(one, other)
    assert found is not None
    assert (found.left_text, found.right_text) == ("a" * CONTEXT, "b" * CONTEXT)


def test_log_probabilities_count_where_both_jobs_have_them() -> None:
    asked = row(0, logprobs=[-0.5, float("nan")])
    assert difference(asked, row(0)) is None
    assert difference(asked, row(0, logprobs=[-0.5, None])) is None, "JSON has no NaN"
    found = difference(asked, row(0, logprobs=[-0.5, -0.25]))
    assert found is not None
    assert (found.what, found.at, found.right) == ("log-probability", 1, -0.25)


def test_only_the_first_examples_are_kept_and_all_are_counted() -> None:
    other = [replace(one, text="another") for one in rows(40)][::-1]
    found = compare(rows(40), [*other, *(row(n) for n in range(100, 130))], most=3)
    assert found.differ == 40
    assert len(found.differences) == 3
    assert (found.only_right, len(found.ids_only_right)) == (30, 3)


@pytest.mark.pipeline  # starts processes
def test_four_times_the_rows_take_no_more_memory() -> None:
    # The waiting rows of the larger comparison are 80 MiB more.
    small, large = told_peaks(COMPARING, 100_000)
    assert large - small < 20


@pytest.mark.long
def test_memory_stays_where_it_is_over_a_million_rows() -> None:
    small, large = told_peaks(COMPARING, 1_000_000)
    assert large - small < 20


JOB = JobRow(
    job_id="0123456789abc", name="night", tenant="default",
    spec={"sampling": {"seed": 1, "top_p": 1.0}, "output": {"uri": "a"}, "name": "a"},
    spec_digest="", state=JobState.DONE, stage=Stage.END, verifier="v", proposer="p",
    output_uri="out", workspace_uri="w", idempotency_key=None, cancel_requested=False, error=None,
    rows_total=10, groups_total=2, prompt_tokens=100, created_at=0.0, started_at=1.0,
    finished_at=5.0, model_fingerprint="f", numeric_class="exact/f32/1",
)  # fmt: skip


def test_what_decides_outputs_is_compared_and_nothing_else() -> None:
    spec = {"sampling": {"seed": 2, "top_p": 1.0}, "output": {"uri": "b"}, "name": "b"}
    other = replace(JOB, spec=spec, model_fingerprint="g", proposer="q")
    assert spec_differences(JOB, other) == {
        "model fingerprint": ("f", "g"),
        "sampling.seed": (1, 2),
    }
    assert spec_differences(JOB, JOB) == {}


def test_own_speculation_of_vllm_decides_outputs_and_a_draft_model_does_not() -> None:
    head = {"kind": "eagle3", "model": "o/head"}
    of_head, of_suffixes, of_text = (
        replace(JOB, spec={**JOB.spec, "proposer": proposer})
        for proposer in (head, {"kind": "suffix", "model": None}, "o/draft")
    )
    assert spec_differences(of_head, of_suffixes) == {"proposer": ("eagle3:o/head", "suffix")}
    assert spec_differences(of_head, of_text) == {"proposer": ("eagle3:o/head", None)}
    assert spec_differences(JOB, of_text) == {}


def test_policies_that_differ_are_named_without_what_they_look_for() -> None:
    policies = [
        {"use": "patterns", "patterns": {"secret": word}, "verdict": "block"} for word in "ab"
    ]
    one, other = (replace(JOB, spec={**JOB.spec, "policies": [policy]}) for policy in policies)
    assert spec_differences(one, one) == {}
    found = spec_differences(one, other)
    assert list(found) == ["policies"]
    assert all(
        shown.startswith("patterns (") and "secret" not in shown for shown in found["policies"]
    )
    assert spec_differences(JOB, one)["policies"][0] is None
