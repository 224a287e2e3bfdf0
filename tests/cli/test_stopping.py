"""Priority, deadline and budget on the command line; what `show` and `cancel` say of them."""

from __future__ import annotations

import getpass
from pathlib import Path
from typing import Any

import pytest
import yaml

from specbatch.jobs.cli.connect import load_settings
from specbatch.pipeline.bootstrap import make_store
from specbatch.schemas.errors import UsageError


def submitted(cli: Any, job: Any, *flags: object) -> str:
    """A job that is stored and not yet begun."""
    assert cli("submit-job", *job, "--local", "--timeout", 0, *flags).code == 6
    return str(cli("jobs", "--json").json[0]["job"])


def test_show_tells_class_deadline_and_budget(cli: Any, job: Any) -> None:
    flags = ("--priority", "high", "--deadline-sec", 3600, "--budget-usd", 2.5)
    shown = cli("show", submitted(cli, job, *flags)).out
    assert "priority: high" in shown
    assert "deadline: 2" in shown
    assert "budget: $2.5" in shown


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--priority", "urgent", "field `priority`"),
        ("--deadline-sec", 0, "field `deadline_sec`"),
        ("--budget-usd", -1, "field `budget_usd`"),
    ],
)
def test_wrong_limits_are_refused_by_field(
    cli: Any, job: Any, flag: str, value: object, words: str
) -> None:
    refused = cli("submit-job", *job, "--local", flag, value)
    assert refused.code == 2
    assert words in refused.complaint


def test_a_cancelled_job_says_by_whom_and_leaves_a_job(cli: Any, job: Any, folder: Path) -> None:
    job_id = submitted(cli, job)
    assert "finished rows are kept" in cli("cancel", job_id).out
    ended = cli("retry", job_id, "--local")
    assert ended.code == 5
    reason = f"cancelled by {getpass.getuser()}"
    assert f"was stopped ({reason})" in ended.err.replace("\n", " ")
    shown = cli("show", job_id).out
    assert f"stopped: {reason}" in shown
    assert "no reason given" not in shown
    spec = folder / "out" / f"remainder-{job_id}.yaml"
    assert yaml.safe_load(spec.read_text())["input"]["uri"] == f"remainder-{job_id}.parquet"
    rest = cli("submit-job", spec, "--local", "--json")
    assert rest.code == 0
    assert (rest.json["state"], rest.json["rows"]) == ("done", 12)


def test_a_job_that_is_late_ends_with_5_and_says_so(cli: Any, job: Any) -> None:
    ended = cli("submit-job", *job, "--local", "--json", "--deadline-sec", 0.001)
    assert (ended.code, ended.json["state"]) == (5, "cancelled")
    job_id = ended.json["job"]
    assert "stopped: its deadline of 2" in cli("show", job_id).out
    again = cli("retry", job_id, "--local", "--json")
    assert (again.code, again.json["state"]) == (0, "done"), "a retry lifts what was reached"


def test_the_same_key_finds_the_job_and_says_that_nothing_is_done_twice(cli: Any, job: Any) -> None:
    keyed = [*job, "--local", "--idempotency-key", "k", "--priority", "low"]
    cli("submit-job", *keyed)
    again = cli("submit-job", *keyed)
    said = again.err.replace("\n", " ")
    assert "is known by this key and done: nothing is done again" in said
    assert "to do its rows again, name another key and another output" in said
    assert len(cli("jobs", "--json").json) == 1


@pytest.mark.parametrize(
    ("flag", "value", "field"),
    [
        ("--priority", "high", "priority"),
        ("--deadline-sec", 60, "deadline_sec"),
        ("--budget-usd", 1, "budget_usd"),
    ],
)
def test_another_limit_under_a_key_is_named(
    cli: Any, job: Any, flag: str, value: object, field: str
) -> None:
    keyed = [*job, "--local", "--idempotency-key", "k"]
    cli("submit-job", *keyed, "--timeout", 0)
    refused = cli("submit-job", *keyed, flag, value)
    assert refused.code == 2
    assert f"differs in: {field})" in refused.complaint


def test_tenants_weights_are_checked_and_reach_the_store(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert folder.is_dir()
    monkeypatch.setenv("SPECBATCH_TENANT_WEIGHTS", '{"legal": 0}')
    with pytest.raises(UsageError, match="SPECBATCH_TENANT_WEIGHTS"):
        load_settings()
    monkeypatch.setenv("SPECBATCH_TENANT_WEIGHTS", '{"legal": 2.5}')
    store = make_store(load_settings())
    assert store._weights == {"legal": 2.5}  # type: ignore[attr-defined]  # of the SQL store
    store.close()
