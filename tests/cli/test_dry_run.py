"""`--dry-run` counts everything and starts nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specbatch.jobs.cli.dry_run import make_plan
from specbatch.pipeline.inputs.token_bounds import most_tokens
from specbatch.pipeline.operations import preflight
from specbatch.schemas.records import PromptRow
from specbatch.schemas.spec import load_spec


def test_a_plan_counts_rows_tokens_groups_and_bad_rows(
    cli: Any, job: Any, bad_rows: Path, folder: Path
) -> None:
    shutil.rmtree(folder / "specbatch-data")  # a plan needs no store, and makes none
    planned = cli("submit-job", *job, "--dry-run", "--json", "--input", bad_rows, "--n", 2,
                  "--group-size", 2)  # fmt: skip
    assert planned.code == 0
    plan = planned.json
    assert plan["dry_run"] is True
    assert (plan["rows"], plan["prompts"], plan["rows_failed"]) == (8, 5, 3)
    assert (plan["groups"], plan["completions"]) == (3, 10)
    assert plan["prompt_tokens"] == 5
    assert plan["max_completion_tokens"] == plan["max_sampled_tokens"] == 60
    assert plan["quarantined"] == {"null_prompt": 1, "empty_prompt": 1, "duplicate_id": 1}
    assert plan["examples"]["null_prompt"] == ["row 1: the prompt is null"]
    assert 0 <= plan["peak_rss_mib_above_imports"] < 600
    assert plan["estimated_sec"] == pytest.approx(60 / plan["tokens_per_sec"])
    assert sorted(path.name for path in folder.iterdir()) == ["bad.parquet", "prompts.parquet"]


def test_a_plan_says_where_its_speed_is_from(cli: Any, job: Any) -> None:
    assumed = cli("submit-job", *job, "--dry-run", "--json").json
    assert assumed["speed_from"].startswith("assumed")
    told = cli("submit-job", *job, "--dry-run", "--json", "--tokens-per-sec", 50).json
    assert (told["tokens_per_sec"], told["speed_from"]) == (50, "as --tokens-per-sec says")
    cli("submit-job", *job, "--local")
    measured = cli("submit-job", *job, "--dry-run", "--json", "--output", "out2").json
    assert measured["speed_from"] == "measured on earlier jobs with this verifier (1)"


@pytest.mark.parametrize(
    ("sampling", "own", "tries"),
    [
        ({"temperature": 0.7}, {}, 4),
        ({}, {}, 1),  # the likeliest tokens are the same each time
        ({}, {"temperature": 1.0, "max_tokens": 7}, 4),
    ],
)
def test_a_plan_counts_what_is_continued_and_what_is_sampled_again(
    sampling: dict[str, Any], own: dict[str, Any], tries: int
) -> None:
    spec = load_spec({
        "input": {"uri": "/in"},
        "output": {"uri": "/out", "malformed": {"max_tokens": 4096, "retries": 3}},
        "verifier": "v",
        "sampling": {"response_format": {"type": "json_object"}, **sampling},
    })  # fmt: skip
    row = PromptRow(0, "a", (1, 2, 3), seed=0, n=2, overrides=own)
    group = SimpleNamespace(next_row=1, rows=[row], rejected=[])
    checked: Any = SimpleNamespace(groups=lambda: [group], context_tokens=8192)
    plan = make_plan(checked, spec)
    assert plan.max_completion_tokens == most_tokens(spec, row) - 2 * 3
    assert plan.max_sampled_tokens == tries * plan.max_completion_tokens


def test_people_get_a_table_and_examples(cli: Any, job: Any, bad_rows: Path) -> None:
    planned = cli("submit-job", *job, "--dry-run", "--input", bad_rows)
    assert "plan: nothing was started" in planned.out
    assert "quarantine, duplicate_id: 1" in planned.out
    assert "peak memory above imports" in planned.out


def test_a_plan_of_wrong_input_is_refused(cli: Any, job: Any) -> None:
    refused = cli("submit-job", *job, "--dry-run", "--input", "nope.parquet")
    assert refused.code == 2
    assert "does not exist" in refused.complaint


@pytest.mark.usefixtures("s3_out_of_reach")
@pytest.mark.timeout(60)  # what a worker waits for is twice that
def test_an_s3_out_of_reach_is_told_in_seconds(
    cli: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert preflight.ASKED_RETRY_SEC <= 10
    monkeypatch.setattr(preflight, "ASKED_RETRY_SEC", 0.5)
    refused = cli("submit-job", *job, "--dry-run", "--input", "s3://bucket/in.parquet")
    assert refused.code == 2
    assert "cannot look at s3://bucket/in.parquet" in refused.complaint
    assert "127.0.0.1:9" in refused.complaint
