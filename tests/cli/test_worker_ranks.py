"""`specbatch worker` as two processes that share the verifier, started as `torchrun` does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from support.servers import free_port

WORKER = "from specbatch.jobs.cli.main import main; main()"


def test_two_processes_do_a_job_and_end_on_sigterm(
    cli: Any, job: Any, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBATCH_BROKER_URL", redis_url)
    models = [str(value) for name in ("--verifier", "--proposer") for value in of(job, name)]
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, "worker", "all", *models],
            env=os.environ
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            | {"SPECBATCH_TENSOR_PARALLEL": "2", "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        done = cli("submit-job", *job, "--exactness", "fast", "--wait", "--timeout", 300, "--json")
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert done.json["state"] == "done", errors
    assert done.json["rows_failed"] == 0
    assert [rank.returncode for rank in ranks] == [0, 0], errors


def of(job: list[object], flag: str) -> list[object]:
    """The flag and its value; nothing if it is not there."""
    return job[job.index(flag) : job.index(flag) + 2] if flag in job else []


def test_jobs_in_one_process_refuse_the_setting(
    cli: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBATCH_TENSOR_PARALLEL", "2")
    refused = cli("submit-job", *job, "--local")
    assert refused.code == 2
    assert refused.complaint == (
        "SPECBATCH_TENSOR_PARALLEL is for `specbatch worker`: unset it here"
    )


def test_a_device_that_is_not_here_is_refused(
    cli: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBATCH_DEVICE", "cuda:77")
    refused = cli("submit-job", *job, "--local")
    assert refused.code == 2
    assert refused.complaint.startswith("device `cuda:77` is not here")
