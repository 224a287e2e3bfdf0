"""A place that refuses to be written ends a local run with one line, and holds a worker back: no
row is blamed, no attempt is lost, and the job resumes once there is space."""

from __future__ import annotations

import errno
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.outputs.outputs import read_output
from specbatch.schemas.records import JobState
from specbatch.schemas.settings import Settings
from support.local_runs import LocalRuns
from support.refusing import RefusingDisk, run_on
from support.workers import command, wait_until, worker

ROWS = 12
EXIT_FAILED = 4
# What refuses, after a write to what, and what the one line names.
PLACES = {
    "the store": (errno.ENOSPC, "specbatch.db", "prompts-", "specbatch.db refused: database or"),
    "the store, over a quota": (errno.EDQUOT, "specbatch.db", "results-", "specbatch.db refused:"),
    "the workspace": (errno.ENOSPC, "results-", "", "results-"),
    "the workspace, over a quota": (errno.EDQUOT, "results-", "", "raise this user's quota"),
    "the workspace, at the first file": (errno.EROFS, "prompts-", "", "read-only file system"),
    "the output": (errno.ENOSPC, "/out/", "results-", "/out/"),
    "the folder for temporary files": (errno.ENOSPC, "/scratch/specbatch-", "", "/scratch"),
}
# Another error or moment at a place of these, which takes the same way.
LIKE_OTHERS = {"the store, over a quota", "the workspace", "the workspace, over a quota"}


@pytest.fixture
def disk(tmp_path: Path) -> RefusingDisk:
    return RefusingDisk(tmp_path)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[LocalRuns]:
    (tmp_path / "scratch").mkdir()
    made = LocalRuns(tmp_path, {"TMPDIR": str(tmp_path / "scratch")}, rows=ROWS, tokens=4, group=4)
    yield made
    made.store.close()


@pytest.mark.parametrize(
    "refusal",
    [
        pytest.param(PLACES[name], id=name, marks=[pytest.mark.long] * (name in LIKE_OTHERS))
        for name in PLACES
    ],
)
def test_a_local_run_names_the_place_that_refuses_and_its_job_resumes(
    disk: RefusingDisk, place: LocalRuns, refusal: tuple[int, str, str, str]
) -> None:
    number, refusing, after, named = refusal
    disk.refuse(number, refusing, after)
    ended = run_on(disk, place, *place.job("out"))
    assert ended.returncode == EXIT_FAILED, ended.stderr[-3000:]
    assert disk.refusals > 0
    assert "Traceback" not in ended.stderr
    said = [line for line in ended.stderr.splitlines() if "prompts, " not in line]
    [line] = [line for line in said if line]
    assert line.startswith("error: ")
    assert named in line

    [job] = place.store.list_jobs()
    assert not job.state.is_final
    assert place.store.failed_groups(job.job_id) == []
    disk.take()
    found = re.search(r"`(specbatch retry .* --local)`", line)
    assert found is not None, line
    resumed = run_on(disk, place, *shlex.split(found[1]))
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert place.store.get_job(job.job_id).state is JobState.DONE
    assert len(place.output("out")) == ROWS


@pytest.mark.parametrize(
    ("refusing", "named"),
    [("results-", "results-"), ("/out/.part-", "/out/data/part-")],
    ids=["workspace", "output"],
)
def test_a_worker_waits_for_space_and_no_group_loses_an_attempt(
    disk: RefusingDisk,
    place: LocalRuns,
    redis_url: str,
    postgres_url: str,
    refusing: str,
    named: str,
) -> None:
    environment = place.environment | {
        "SPECBATCH_BROKER_URL": redis_url,
        "SPECBATCH_DATABASE_URL": postgres_url,
        "SPECBATCH_MAX_ATTEMPTS": "1",  # the first that were lost would fail its group
        "SPECBATCH_MESSAGE_PATIENCE_SEC": "1",
    }
    store = make_store(Settings(database_url=postgres_url))
    disk.refuse(errno.ENOSPC, refusing)
    submit = [word for word in place.job("out") if word != "--local"]
    job_id = command(*submit, environment=environment, cwd=place.home)["job"]
    arguments = ("all", "--verifier", str(place.model), "--concurrency", "2")
    with worker(*arguments, environment=environment | disk.environment, cwd=place.home) as one:
        wait_until("several tries", lambda: disk.refusals >= 4, [one])
        told = [line for line in one.text().splitlines() if "no space left on device" in line]
        assert len(told) == 1, one.text()
        assert "free space there" in told[0]
        assert named in told[0]
        assert not store.get_job(job_id).state.is_final
        assert store.failed_groups(job_id) == []
        disk.take()
        wait_until("its end", lambda: store.get_job(job_id).state.is_final, [one])
        assert "Traceback" not in one.text()
    assert store.get_job(job_id).state is JobState.DONE
    table = read_output(str(place.home / "out"))
    assert table["error"].null_count == ROWS
    store.close()


def test_each_output_that_refuses_is_named(
    disk: RefusingDisk, place: LocalRuns, redis_url: str, postgres_url: str
) -> None:
    """Two jobs of one worker, each with an output of its own on a full disk."""
    environment = place.environment | {
        "SPECBATCH_BROKER_URL": redis_url,
        "SPECBATCH_DATABASE_URL": postgres_url,
        "SPECBATCH_MESSAGE_PATIENCE_SEC": "1",
    }
    disk.refuse(errno.ENOSPC, "/.part-")
    for name in ("here", "there"):
        submit = [word for word in place.job(name) if word != "--local"]
        command(*submit, environment=environment, cwd=place.home)
    with worker(
        *("all", "--verifier", str(place.model)),
        environment=environment | disk.environment,
        cwd=place.home,
    ) as one:
        wait_until(
            "both are named",
            lambda: (
                {
                    name
                    for name in ("here", "there")
                    for line in one.text().splitlines()
                    if f"/{name}/data/part-" in line and "no space left on device" in line
                }
                == {"here", "there"}
            ),
            [one],
        )


def test_space_comes_back_without_any_command(
    disk: RefusingDisk, place: LocalRuns, redis_url: str
) -> None:
    """The store itself refuses: what a worker holds is given back, without an attempt, later."""
    environment = place.environment | {
        "SPECBATCH_BROKER_URL": redis_url,
        "SPECBATCH_MAX_ATTEMPTS": "1",
        "SPECBATCH_MESSAGE_PATIENCE_SEC": "1",
    }
    submit = [word for word in place.job("out") if word != "--local"]
    job_id = command(*submit, environment=environment, cwd=place.home)["job"]
    disk.refuse(errno.ENOSPC, "specbatch.db", after="results-")
    arguments = ("all", "--verifier", str(place.model), "--concurrency", "2")
    with worker(*arguments, environment=environment | disk.environment, cwd=place.home) as one:
        wait_until("several tries", lambda: disk.refusals >= 4, [one])
        disk.take()
        wait_until("its end", lambda: place.store.get_job(job_id).state.is_final, [one])
        text_of_log = one.text()
        told = [line for line in text_of_log.splitlines() if "disk is full" in line]
        assert 1 <= len(told) <= 2, text_of_log  # `worker all` is two processes
        assert "Traceback" not in text_of_log
    assert place.store.get_job(job_id).state is JobState.DONE
    assert len(place.output("out")) == ROWS
