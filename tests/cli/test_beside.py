"""`specbatch worker all` is two processes: one with the engine, one for all that needs none."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from specbatch.pipeline.outputs.outputs import read_output
from support import demo
from support.workers import WorkerProcess, command, wait_until, worker

pytestmark = pytest.mark.pipeline  # starts processes

MODELS = ("--verifier", str(demo.VERIFIER), "--proposer", "none")
JOB = ("submit-job", "--input", str(demo.PROMPTS), *MODELS, "--max-tokens", "4")


def beside(one: WorkerProcess) -> list[int]:
    """The processes that it started for the work without an engine, and that run."""
    found = []
    for children in Path(f"/proc/{one.process.pid}/task").glob("*/children"):
        found += [pid for pid in map(int, children.read_text().split()) if runs(pid)]
    return found


def runs(pid: int) -> bool:
    try:
        return b"specbatch.jobs.cli.beside" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def niceness(pid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid)


def environment_of(redis_url: str, folder: Path) -> dict[str, str]:
    return {
        "SPECBATCH_BROKER_URL": redis_url,
        "SPECBATCH_WORKSPACE": str(folder / "workspace"),
    }


def test_the_process_beside_may_be_killed_and_ends_with_the_engines(
    redis_url: str, tmp_path: Path
) -> None:
    environment = environment_of(redis_url, tmp_path)
    with worker("all", *MODELS, environment=environment, cwd=tmp_path) as one:
        (killed,) = wait_until("it runs", lambda: beside(one), [one])
        os.kill(killed, signal.SIGKILL)
        wait_until("another runs", lambda: beside(one) not in ([], [killed]), [one])
        (another,) = beside(one)
        command(*JOB, "--output", "out", "--wait", environment=environment, cwd=tmp_path)
        rows = pq.read_metadata(demo.PROMPTS).num_rows
        assert read_output(str(tmp_path / "out")).num_rows == rows
        assert niceness(another) > niceness(one.process.pid)
        assert f"ended with -{int(signal.SIGKILL)}; another is started" in one.text()
        one.kill()
        wait_until("it has ended too", lambda: not runs(another))


def test_a_worker_that_is_asked_to_end_takes_the_process_beside_along(
    redis_url: str, tmp_path: Path
) -> None:
    environment = environment_of(redis_url, tmp_path)
    with worker("all", *MODELS, environment=environment, cwd=tmp_path) as one:
        (other,) = wait_until("it runs", lambda: beside(one), [one])
        wait_until("it listens", lambda: "worker for" in one.text(), [one])
        one.end()
        wait_until("it has ended too", lambda: not runs(other))
