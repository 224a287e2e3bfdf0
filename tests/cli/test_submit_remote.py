"""`submit-job` for workers elsewhere: what is checked here, and how the waiting ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def shared(cli: Any, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The commands, with a broker that other processes could share."""
    monkeypatch.setenv("SPECBATCH_BROKER_URL", redis_url)
    return cli


def test_submitting_prints_the_job_and_ends_with_0(shared: Any, job: Any) -> None:
    done = shared("submit-job", *job)
    assert done.code == 0
    assert shared("show", done.out.strip(), "--json").json["state"] == "queued"


def test_submitting_with_json_prints_one_object(shared: Any, job: Any) -> None:
    done = shared("submit-job", *job, "--json")
    assert len(done.out.strip().splitlines()) == 1
    assert (done.json["state"], done.json["tokens"]) == ("queued", 0)


def test_waiting_gives_up_with_6_and_the_job_stays(shared: Any, job: Any) -> None:
    done = shared("submit-job", *job, "--wait", "--timeout", 0)
    assert done.code == 6
    assert "it keeps running" in done.complaint
    assert shared("jobs", "--json").json[0]["state"] == "queued"


def test_ctrl_c_ends_only_the_waiting(
    shared: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specbatch.pipeline.runtime.client.time.sleep", interrupt)
    done = shared("submit-job", *job, "--wait")
    assert done.code == 130
    assert "continues" in done.err


def test_the_same_key_finds_the_waiting_job(shared: Any, job: Any) -> None:
    first = shared("submit-job", *job, "--idempotency-key", "k")
    second = shared("submit-job", *job, "--idempotency-key", "k")
    assert second.out == first.out
    assert "known" in second.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--input", "nope.parquet"], "does not exist"),
        (["--input", "x*.parquet"], "no file matches"),
        (["--input", "cut.parquet"], "is truncated or not Parquet"),
        (["--prompt-column", "p"], "no column `p`; its columns are id, prompt, number"),
    ],
)
def test_what_can_be_seen_here_is_checked_before_submitting(
    shared: Any, job: Any, folder: Path, flags: list[str], words: str
) -> None:
    whole = (folder / "prompts.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    refused = shared("submit-job", *job, *flags)
    assert refused.code == 2
    assert words in refused.complaint
    assert shared("jobs", "--json").json == []


@pytest.mark.parametrize("uri", ["*.parquet", ".", "s3://bucket/far.parquet"])
def test_inputs_of_every_kind_pass(shared: Any, job: Any, uri: str) -> None:
    assert shared("submit-job", *job, "--input", uri).code == 0


def test_a_folder_is_looked_at_as_workers_read_it(shared: Any, job: Any, folder: Path) -> None:
    """Not at what other programs leave beside their parts."""
    parts = folder / "parts"
    (parts / "_temporary").mkdir(parents=True)
    (parts / "part-0.parquet").write_bytes((folder / "prompts.parquet").read_bytes())
    (parts / "_temporary" / "cut.parquet").write_bytes(b"PAR1")
    (parts / "._part-0.parquet").write_bytes(b"of another system")
    assert shared("submit-job", *job, "--input", "parts").code == 0
    (parts / "notes.jsonl").write_text("no prompts")
    (parts / "empty.parquet").mkdir()
    spec = folder / "job.yaml"
    spec.write_text("input: {uri: parts, format: parquet}\n")
    rest = job[2:]  # without --input
    assert shared("submit-job", spec, *rest).code == 0
    for file in parts.glob("part-*"):
        file.unlink()
    refused = shared("submit-job", spec, *rest)
    assert "holds no *.parquet files" in refused.complaint
