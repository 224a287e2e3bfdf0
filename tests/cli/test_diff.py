"""`specbatch diff`: 0 for equal outputs, 1 for different ones, 2 where that cannot be said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli.conftest import flags_of_a_job, run_in, write
from cli.test_results import in_store, publish
from ledger.builders import JOB

from specbatch.pipeline.bootstrap import make_store
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.settings import Settings
from support.databases import migrated
from support.models import TinyPair


def test_a_job_is_equal_to_itself(cli: Any, folder: Path) -> None:
    in_store(folder)
    publish(folder, "jsonl")
    done = cli("diff", JOB, JOB)
    assert done.code == 0
    assert done.out.splitlines() == [
        "identical: 34",
        "different: 0",
        "the jobs have the same model, numeric class, input and sampling",
    ]
    told = cli("diff", JOB, JOB, "--json").json
    assert (told["equal"], told["identical"], told["jobs"]) == (True, 34, [JOB, JOB])


def test_trouble_is_2_as_diff_has_it(
    cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("diff", "no-such-job", "nor-this").code == 2
    monkeypatch.setenv("SPECBATCH_ENCRYPTION_KEY", "A" * 43 + "=")
    in_store(folder, privacy=PrivacyMode.REDACTED)
    done = cli("diff", JOB, JOB)
    assert done.code == 2
    assert "the jobs cannot be compared: the store keeps texts" in done.complaint
    publish(folder)
    part = folder / "out" / "data" / "part-00000.parquet"
    part.write_bytes(b"cut")
    assert cli("diff", JOB, JOB).code == 2, "not 4, which is the code of such errors elsewhere"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, tiny_pair: TinyPair) -> Path:
    """A folder with four jobs that are done, for tests that only compare them."""
    folder = tmp_path_factory.mktemp("jobs")
    migrated(folder / "specbatch-data" / "specbatch.db")
    write(folder / "prompts.parquet", [f"def f{i}(x):" for i in range(12)])
    flags = ("--temperature", 0.8, "--dtype", "float32", "--logprobs")
    for name, seed, depth, tokens in (
        *(("one", 1, 3, 8), ("two", 1, "off", 8)),
        *(("three", 2, 3, 8), ("longer", 2, 3, 16)),
    ):
        more = ("--name", name, "--output", name, "--seed", seed, "--depth", depth)
        order = (*flags_of_a_job(tiny_pair), *flags, *more, "--max-tokens", tokens)
        done = run_in(folder, "submit-job", "--local", *order)
        assert done.code == 0, done.err
    return folder


def test_real_jobs_are_equal_with_and_without_drafts_and_differ_by_their_seed(
    cli: Any, jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(jobs)
    equal = cli("diff", "one", "two")
    assert equal.code == 0, equal.out
    assert equal.out.startswith("identical: 12\ndifferent: 0\n")
    other = cli("diff", "one", "three", "--max", 2)
    assert other.code == 1
    lines = other.out.splitlines()
    assert lines[1].startswith("different: ")
    assert sum(line.startswith("row-") for line in lines) == 2
    assert "sampling.seed: 1 and 2" in lines
    told = cli("diff", "one", "three", "--json").json
    assert told["specs"] == {"sampling.seed": [1, 2]}
    assert told["identical"] + told["different"] == 12
    first = told["differences"][0]
    store = make_store(Settings())
    records = {c.row_id: c.token_ids for c in store.completions(store.get_job("one").job_id)}
    store.close()
    assert records[first["row_id"]][first["at"]] == first["left"]


def test_thresholds_say_by_how_much_two_models_may_differ(
    cli: Any, jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(jobs)
    assert cli("diff", "one", "three").code == 1
    within = cli("diff", "one", "three", "--max-length", 30, "--max-logprob", 50)
    assert within.code == 0, within.out
    lines = within.out.splitlines()
    assert lines[-1] == "within the thresholds"
    assert any(line.startswith("log-probability of a token: -") for line in lines)
    assert any(line.startswith("ended by length: ") for line in lines)
    longer = cli("diff", "one", "longer", "--max-length", 30, "--json")
    assert longer.code == 1
    assert "more than 30.0% apart" in longer.json["exceeded"][0]
    assert longer.json["written"][1]["mean_tokens"] > longer.json["written"][0]["mean_tokens"]
    different = cli("diff", "one", "three", "--max-different", 1)
    assert different.code == 1
    assert "of the rows differ, more than 1.0%" in different.out
    same = ("diff", "one", "one", "--max-different", 0, "--max-length", 0, "--max-logprob", 0)
    assert cli(*same).code == 0


def test_without_log_probabilities_there_is_no_threshold_of_them(
    cli: Any, job: list[object], tiny_pair: Any
) -> None:
    assert tiny_pair
    assert cli("submit-job", *job, "--local", "--dtype", "float32", "--output", "one").code == 0
    (told,) = cli("jobs", "--json").json
    done = cli("diff", told["job"], told["job"], "--max-logprob", 1)
    assert done.code == 2
    assert "no log-probabilities to compare" in done.complaint
