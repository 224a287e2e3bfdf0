"""A local run works on its own job; one that was left in the middle says so, and how it resumes."""

from __future__ import annotations

import json
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from specbatch.schemas.records import JobState
from support.local_runs import ROWS, LocalRuns

ANY_JOB = r"`(specbatch retry {} --local)`"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[LocalRuns]:
    made = LocalRuns(tmp_path)
    yield made
    made.store.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a job writes that nobody interrupts."""
    place = LocalRuns(tmp_path_factory.mktemp("whole"))
    done = place.run(*place.job("out"))
    assert done.returncode == 0, done.stderr[-3000:]
    place.store.close()
    return place.output("out")


def told_command(text: str, job_id: str) -> list[str]:
    """The command that a text says resumes the job."""
    found = re.search(ANY_JOB.format(job_id), text.replace("\n", " "))
    assert found is not None, text
    return shlex.split(found[1])


def shown_everywhere(place: LocalRuns, job_id: str) -> list[str]:
    """The command that resumes it, as `jobs`, `show` and `top` all say."""
    jobs = place.run("specbatch", "jobs").stdout
    [line] = [line for line in jobs.splitlines() if line.startswith(job_id)]
    assert " interrupted " in line
    show = place.run("specbatch", "show", job_id).stdout
    top = place.run("specbatch", "top", "--once").stdout
    assert re.search(rf"^ *{job_id[:12]} .*interrupted ", top, re.MULTILINE), top
    commands = [told_command(text, job_id) for text in (jobs, show, top)]
    assert commands[0] == commands[1] == commands[2]
    return commands[0]


def interrupted(place: LocalRuns) -> dict[str, bool]:
    """By job, as programs read it."""
    told = json.loads(place.run("specbatch", "jobs", "--json").stdout)
    return {job["job"]: job["interrupted"] for job in told}


def test_another_local_job_leaves_a_killed_one_alone_and_the_command_resumes_it(
    place: LocalRuns, expected: dict[str, str]
) -> None:
    job_id, _ = place.ended_in_the_middle(signal.SIGKILL, "first")
    place.leases_run_out()
    done_before = place.done(job_id)

    other = place.run(*place.job("second", "--json"))
    assert other.returncode == 0, other.stderr[-3000:]
    assert place.output("second") == expected
    assert place.store.get_job(job_id).state is JobState.RUNNING
    assert place.done(job_id) == done_before
    resume = shown_everywhere(place, job_id)
    assert interrupted(place) == {job_id: True, json.loads(other.stdout)["job"]: False}

    resumed = place.run(*resume)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert place.output("first") == expected
    assert not any(interrupted(place).values())


def test_of_several_interrupted_jobs_the_named_one_resumes(
    place: LocalRuns, expected: dict[str, str]
) -> None:
    first, _ = place.ended_in_the_middle(signal.SIGKILL, "first")
    second, _ = place.ended_in_the_middle(signal.SIGKILL, "second")
    place.leases_run_out()
    assert interrupted(place) == {first: True, second: True}
    done_before = place.done(first)

    resumed = place.run(*shown_everywhere(place, second))
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert place.output("second") == expected
    assert place.done(first) == done_before < ROWS
    assert interrupted(place) == {first: True, second: False}
    resumed = place.run(*shown_everywhere(place, first))
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert place.output("first") == expected


def test_after_ctrl_c_the_job_is_interrupted_at_once_and_resumes(
    place: LocalRuns, expected: dict[str, str]
) -> None:
    job_id, told = place.ended_in_the_middle(signal.SIGINT, "out")
    resume = shown_everywhere(place, job_id)
    assert told_command(told, job_id) == resume
    resumed = place.run(*resume)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert place.output("out") == expected


def test_who_resumes_a_killed_job_waits_for_no_lease(
    tmp_path: Path, expected: dict[str, str]
) -> None:
    place = LocalRuns(tmp_path, {"SPECBATCH_LEASE_SEC": "7200"})
    job_id, _ = place.ended_in_the_middle(signal.SIGKILL, "out")
    resumed = place.run("specbatch", "retry", job_id, "--local")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert place.output("out") == expected
    place.store.close()
