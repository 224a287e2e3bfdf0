"""The most that a job's rows can take, and the least that they do."""

from __future__ import annotations

from typing import Any

import pytest

from specbatch.pipeline.inputs.token_bounds import least_tokens, most_tokens
from specbatch.schemas.budgets import LeastTokens
from specbatch.schemas.records import PromptRow
from specbatch.schemas.spec import JobSpec


def spec(**values: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "nightly",
            "verifier": "/models/big",
            "input": {"uri": "prompts.parquet"},
            "output": {"uri": "out"},
            "sampling": {"max_tokens": 100},
        }
        | values
    )


def row(n: int = 1, **overrides: Any) -> PromptRow:
    return PromptRow(0, "a", (1, 2, 3), seed=0, n=n, overrides=overrides)


def test_each_sample_has_its_prompt_and_its_longest_output() -> None:
    assert most_tokens(spec(), row()) == 103
    assert most_tokens(spec(), row(n=4)) == 412
    assert most_tokens(spec(), row(n=2, max_tokens=7)) == 20
    longer = spec(output={"uri": "out", "malformed": {"max_tokens": 300}})
    assert most_tokens(longer, row()) == most_tokens(longer, row(max_tokens=7)) == 303


@pytest.mark.parametrize(
    ("values", "least"),
    [
        ({}, LeastTokens(101, 20)),
        ({"sampling": {"max_tokens": 100, "min_tokens": 9, "n": 2}}, LeastTokens(202, 200)),
        ({"reuse_outputs": True}, LeastTokens(101, 0)),
        ({"input": {"uri": "a.jsonl", "format": "openai"}}, LeastTokens(2, 20)),
        ({"input": {"uri": "a.parquet", "sampling_column": "s"}}, LeastTokens(2, 20)),
    ],
)
def test_what_ten_rows_take_at_least(values: dict[str, Any], least: LeastTokens) -> None:
    assert least_tokens(spec(**values), 10) == least
