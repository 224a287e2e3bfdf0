"""`specbatch purge`: by retention, by age, by job; what it says, deletes and leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import Cli
from contracts.shorthand import commit, ended, finish, ingest, verified
from ledger.builders import JOB, Clock, new_job

from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.pipeline.runtime import purge
from specbatch.pipeline.runtime.purge import Due, Purger
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.records import JobRow, JobState


@pytest.fixture
def done(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job of tenant `clinic` that ended long ago, with a file of its own and an output."""
    monkeypatch.setenv("SPECBATCH_WORKSPACE", str(folder / "work"))
    work, out = folder / "work" / "jobs" / JOB, folder / "out"
    work.mkdir(parents=True)
    out.mkdir()
    (work / "results-00000000-1.arrow").write_bytes(b"x")
    (out / "data").mkdir()
    (out / "data" / "part-00000.parquet").write_bytes(b"x")
    (out / "mine.txt").write_bytes(b"x")
    listed = [{"name": "data/part-00000.parquet", "rows": 4, "size_bytes": 1, "sha256": ""}]
    (out / "manifest.json").write_text(json.dumps({"job_id": JOB, "parts": listed}))
    store = open_store(f"sqlite:///{folder}/work/specbatch.db", clock=Clock())
    ingest(store, tenant="clinic", workspace_uri=str(work), output_uri=str(out))
    for index in range(2):
        commit(store, verified(store, index))
    finish(store)
    store.close()
    return folder


def texts(folder: Path, job_id: str = JOB) -> set[str]:
    store = open_store(f"sqlite:///{folder}/work/specbatch.db")
    try:
        return {record.text for record in store.completions(job_id)}
    finally:
        store.close()


def left(folder: Path) -> set[str]:
    """The files of a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_dry_run_says_what_and_changes_nothing(cli: Cli, done: Path) -> None:
    called = cli("purge", "--older-than", "30d", "--dry-run")
    assert (called.code, called.out) == (
        0, f"would purge job {JOB} (nightly; older than 30 days)\n",
    )  # fmt: skip
    assert texts(done) == {"a b"}
    assert list((done / "work" / "jobs" / JOB).iterdir())


def test_retention_is_a_tenants_own(cli: Cli, done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "set SPECBATCH_RETENTION_DAYS" in cli("purge").complaint
    monkeypatch.setenv("SPECBATCH_RETENTION_DAYS", '{"other": 1, "clinic": 1e6}')
    assert cli("purge").out == "0 jobs purged, 0 rows\n"
    monkeypatch.setenv("SPECBATCH_RETENTION_DAYS", '{"clinic": 30}')
    assert "of tenant 'other'" in cli("purge", "--tenant", "other").complaint
    assert cli("purge", "--tenant", "clinic").out == "1 job purged, 8 rows\n"
    assert texts(done) == {""}
    assert not list((done / "work" / "jobs" / JOB).iterdir())
    assert (done / "out" / "data" / "part-00000.parquet").exists()
    assert cli("purge").out == "0 jobs purged, 0 rows\n"


def test_a_job_is_purged_by_name_with_what_its_manifest_lists(cli: Cli, done: Path) -> None:
    assert "leave" not in cli("purge", "--job", JOB[:8], "--output").out
    assert left(done / "out") == {"mine.txt"}
    assert "was purged" in cli("retry", JOB).complaint
    shown = cli("show", JOB)
    assert JobState.DONE in shown.out


def test_an_output_of_an_earlier_version_goes_too(cli: Cli, done: Path) -> None:
    """Its parts lie beside the manifest."""
    out = done / "out"
    (out / "data" / "part-00000.parquet").rename(out / "part-00000.parquet")
    manifest = out / "manifest.json"
    manifest.write_text(manifest.read_text().replace("data/part-", "part-"))
    assert cli("purge", "--job", JOB, "--output").code == 0
    assert left(out) == {"mine.txt"}


@pytest.mark.parametrize(
    "name", ["../mine", "data/../mine.txt", "sub/mine", "data/more/mine", "a\\b"]
)
def test_a_manifest_that_names_files_elsewhere_is_not_followed(
    cli: Cli, done: Path, name: str
) -> None:
    manifest = done / "out" / "manifest.json"
    manifest.write_text(json.dumps({"job_id": JOB, "parts": [{"name": name}]}))
    called = cli("purge", "--job", JOB, "--output")
    assert called.code == 4
    assert f"lists {name}, which is not in the output" in called.complaint
    assert "mine.txt" in left(done / "out")


def test_jobs_whose_files_cannot_go_keep_nobody_waiting(cli: Cli, done: Path) -> None:
    """An output whose manifest is none, a workspace that is another's, and a job in order."""
    clock = Clock()
    clock.advance(10.0)
    store = open_store(f"sqlite:///{done}/work/specbatch.db", clock=clock)
    for job_id, workspace in (("b-lost", "elsewhere"), ("c-fine", "c-fine")):
        (done / "work" / "jobs" / workspace).mkdir()
        ended(
            store,
            job_id,
            tenant="clinic",
            workspace_uri=str(done / "work" / "jobs" / workspace),
            output_uri=str(done / job_id),
        )
    store.close()
    manifest = done / "out" / "manifest.json"
    whole = manifest.read_text()
    for wrong in ("{}", "[]"):
        manifest.write_text(wrong)
        called = cli("purge", "--older-than", "30d", "--output")
        assert called.code == 4
        complaints = [line for line in called.err.splitlines() if line.startswith("error: ")]
        assert [line.split()[7].rstrip(";") for line in complaints] == [JOB, "b-lost"]
        assert f"{manifest} is not a manifest" in complaints[0]
        assert called.out.startswith(f"{int(wrong == '{}')} job")
    for job_id in (JOB, "b-lost", "c-fine"):
        assert texts(done, job_id) == {""}
    assert not list((done / "work" / "jobs" / JOB).iterdir())
    manifest.write_text(whole)
    again = cli("purge", "--older-than", "30d", "--output")
    assert (again.code, again.out) == (4, "1 job purged, 0 rows\n"), "they were emptied before"
    assert "could not delete files of job b-lost; the next purge with --output" in again.complaint
    assert left(done / "out") == {"mine.txt"}


def test_what_others_draft_from_goes_with_a_job(cli: Cli, done: Path) -> None:
    store = open_store(f"sqlite:///{done}/work/specbatch.db", clock=Clock())
    files = []
    for job_id in ("b-runs", "c-lost"):
        folder = done / "work" / "jobs" / ("elsewhere" if job_id == "c-lost" else job_id)
        folder.mkdir()
        files.append(folder / "history-1.bin")
        files[-1].write_bytes(b"x")
        store.create_job(new_job(job_id, tenant="clinic", workspace_uri=str(folder)))
    store.close()
    assert cli("purge", "--older-than", "30d", "--dry-run").code == 0
    assert all(file.exists() for file in files)
    called = cli("purge", "--older-than", "30d")
    assert (called.code, called.out) == (4, "0 jobs purged, 8 rows\n")
    assert "could not delete the history file of job c-lost" in called.complaint
    assert "the next purge retries" in called.complaint
    assert [file.exists() for file in files] == [False, True]
    again = cli("purge", "--older-than", "30d")
    assert (again.code, again.out) == (4, "0 jobs purged, 0 rows\n")
    named = cli("purge", "--job", JOB)
    assert f"`specbatch purge --job {JOB}` retries" in named.complaint


@pytest.mark.parametrize("when", ["in the next job", "among the others' files"])
def test_an_interrupted_purge_goes_on_with_what_others_draft_from(
    cli: Cli, done: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    clock = Clock()
    store = open_store(f"sqlite:///{done}/work/specbatch.db", clock=clock)
    folder = done / "work" / "jobs" / "b-runs"
    folder.mkdir()
    (folder / "history-1.bin").write_bytes(b"x")
    store.create_job(new_job("b-runs", tenant="clinic", workspace_uri=str(folder)))
    clock.advance(10.0)
    ended(store, "c-next", tenant="other", workspace_uri=str(done / "work" / "jobs" / "c-next"))
    store.close()

    def interrupted(_: object, job: JobRow, *__: object) -> int:
        if when == "in the next job" and job.job_id == JOB:
            return 0
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        name = "delete_own" if when == "in the next job" else "delete_histories"
        during.setattr(f"specbatch.pipeline.runtime.purge.{name}", interrupted)
        assert cli("purge", "--older-than", "30d").code == 130
    assert texts(done) == {""}
    assert list(folder.iterdir())
    assert cli("purge", "--older-than", "30d").out.startswith("2 jobs purged")
    assert not list(folder.iterdir())
    assert cli("purge", "--older-than", "30d").out == "0 jobs purged, 0 rows\n"


def test_a_listed_job_that_is_at_work_again_is_left(
    cli: Cli, done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"sqlite:///{done}/work/specbatch.db", clock=Clock())
    again, _ = store.create_job(new_job("a-again", workspace_uri=str(done / "a-again")))
    store.close()
    listed = Purger.due

    def first(*given: Any) -> Iterator[Due]:
        return chain([Due(again, "as it was then")], listed(*given))

    monkeypatch.setattr(Purger, "due", first)
    called = cli("purge", "--older-than", "30d")
    assert (called.code, called.out) == (0, "1 job purged, 8 rows\n")
    assert "job a-again is left as it is" in called.err


def test_files_that_are_left_and_cannot_be_listed_keep_nobody_waiting(
    cli: Cli, done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"sqlite:///{done}/work/specbatch.db", clock=Clock())
    work = done / "work" / "jobs"
    for job_id, uri in (("a-far", "gopher://x/a-far"), ("b-left", str(work / "b-left"))):
        ended(store, job_id, privacy=PrivacyMode.HASH_ONLY, workspace_uri=uri)
    store.close()
    (work / "b-left").mkdir()
    (work / "b-left" / "prompts.arrow").write_bytes(b"x")
    monkeypatch.setenv("SPECBATCH_RETENTION_DAYS", '{"clinic": 30}')
    for flags in (["--dry-run"], []):
        called = cli("purge", *flags)
        assert called.code == 4
        assert "could not delete files of job a-far" in called.complaint
    assert "of 1 jobs" in called.err
    assert texts(done) == {""}
    assert not list((work / "b-left").iterdir())


@pytest.mark.usefixtures("s3_out_of_reach")
@pytest.mark.timeout(60)  # what a worker waits for is twice that
def test_an_s3_out_of_reach_is_told_in_seconds(
    cli: Cli, done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert purge.ASKED_RETRY_SEC <= 10
    monkeypatch.setattr(purge, "ASKED_RETRY_SEC", 0.5)
    store = open_store(f"sqlite:///{done}/work/specbatch.db", clock=Clock())
    ended(store, "far", workspace_uri="s3://bucket/far")
    store.close()
    called = cli("purge", "--job", "far")
    assert called.code == 4
    assert "the S3 store at http://127.0.0.1:9 cannot be reached" in called.complaint
    assert "answered" not in called.complaint


@pytest.mark.parametrize("owner", [JOB, "another"])
def test_a_publication_that_was_never_finished_goes_with_the_output(
    cli: Cli, done: Path, owner: str
) -> None:
    out, hexadecimal = done / "out", "0f" * 16
    (out / "data" / "more").mkdir()
    (out / "manifest.json").unlink()
    (out / "_specbatch_job.json").write_text(json.dumps({"job_id": owner}))
    of_job = [
        *("data/part-00001.parquet", "data/part-00001.jsonl", "output.jsonl", "errors.jsonl"),
        "part-00001.parquet",  # of an earlier version
        *(f"remainder-{JOB}.parquet", f"remainder-{JOB}.yaml"),
        *(f".part-00002.parquet.{hexadecimal}.tmp", f".output.jsonl.{hexadecimal}.tmp"),
        f".part-00003.jsonl.{hexadecimal}.tmp",
    ]
    foreign = [
        *("part-00000-1f0e-c000.snappy.parquet", "part-clean.parquet", "part-1.parquet"),
        *("mine.txt", "party.parquet", "part-00000.csv", "remainder-another.parquet"),
        *(f".mine.txt.{hexadecimal}.tmp", ".part-00000.parquet.swp", "sub/part-00000.parquet"),
        *(
            "data/mine.txt",
            "data/part-1.parquet",
            "part-00000.jsonl",
            "data/more/part-00000.parquet",
        ),
    ]
    (out / "sub").mkdir()
    for name in (*of_job, *foreign):
        (out / name).write_bytes(b"x")
    assert cli("purge", "--job", JOB, "--output").code == 0
    others = {*of_job, "data/part-00000.parquet"} if owner == "another" else set()
    assert left(out) == {*foreign, "_specbatch_job.json"} | others


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--older-than", "soon"), "'soon' is not an age"),
        (("--job", JOB, "--tenant", "clinic"), "--job names one job"),
        (("--job", "nojobhere"), "no job 'nojobhere'"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    cli: Cli, done: Path, flags: tuple[str, ...], said: str
) -> None:
    called = cli("purge", *flags)
    assert called.code == 2
    assert said in called.complaint
    assert texts(done) == {"a b"}


def test_a_dry_run_refuses_what_purging_would_refuse(cli: Cli, done: Path) -> None:
    store = open_store(f"sqlite:///{done}/work/specbatch.db", clock=Clock())
    store.create_job(new_job("running"))
    store.close()
    for flags in (["--dry-run"], []):
        refused = cli("purge", "--job", "running", *flags)
        assert (refused.code, refused.out) == (2, "")
        assert "cancel it first, or wait for its end" in refused.complaint
