"""`specbatch worker` as two processes that share the verifier, with what `torchrun` gives each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from specbatch.schemas.errors import DeviceLostError
from support import forks
from support.servers import free_port
from support.workers import WAIT_SEC, WorkerProcess

pytestmark = pytest.mark.pipeline  # starts processes

WORKER = "from specbatch.jobs.cli.main import main; main()"
# The same, where rank 0's memory is gone in its tenth pass: the other one is in that pass.
LOSING = """
import os
from specbatch.jobs.cli.main import main
from specbatch.pipeline.engines.exact.model.torch_decoder import TorchDecoder

forward, passes = TorchDecoder.forward, []

def lose(self, batch):
    passes.append(1)
    if len(passes) == 10 and os.environ["RANK"] == "0":
        raise MemoryError("none left")
    return forward(self, batch)

TorchDecoder.forward = lose
main()
"""


def test_two_processes_do_a_job_and_end_on_sigterm(
    cli: Any, job: Any, folder: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBATCH_BROKER_URL", redis_url)
    with started(WORKER, job, folder) as ranks:
        done = cli("submit-job", *job, "--exactness", "fast", "--wait", "--timeout", 300, "--json")
        for rank in ranks:
            rank.process.terminate()
        errors = [ended(rank) for rank in ranks]
    assert done.json["state"] == "done", errors
    assert done.json["rows_failed"] == 0
    assert [rank.process.returncode for rank in ranks] == [0, 0], errors


def test_ranks_out_of_step_end_instead_of_waiting_for_each_other(
    cli: Any, job: Any, folder: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBATCH_BROKER_URL", redis_url)
    assert cli("submit-job", *job, "--exactness", "fast").code == 0
    with started(LOSING, job, folder) as ranks:
        errors = [ended(rank) for rank in ranks]
    assert ranks[0].process.returncode == DeviceLostError.exit_code, errors
    assert ranks[1].process.returncode != 0, errors
    assert "the ranks are out of step: MemoryError: none left" in errors[0]
    assert "Traceback" not in errors[0].partition("engine step failed; ")[0]


def test_a_worker_whose_other_process_is_gone_ends_when_it_is_asked_to(
    cli: Any, job: Any, folder: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBATCH_BROKER_URL", redis_url)
    with started(WORKER, job, folder) as ranks:
        done = cli("submit-job", *job, "--exactness", "fast", "--wait", "--timeout", 300, "--json")
        ranks[1].kill()
        ranks[0].process.terminate()
        error = ended(ranks[0])
    assert done.json["state"] == "done", error
    assert ranks[0].process.returncode == DeviceLostError.exit_code, error
    assert "the ranks are out of step" in error
    assert "Traceback" not in error


@contextmanager
def started(code: str, job: list[object], folder: Path) -> Iterator[list[WorkerProcess]]:
    """The two processes of a worker for the job's models, killed at the end if they still run."""
    models = [str(value) for name in ("--verifier", "--proposer") for value in of(job, name)]
    of_both = {
        **{"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
        **{"SPECBATCH_TENSOR_PARALLEL": "2", "OMP_NUM_THREADS": "1"},
    }
    with ExitStack() as stack:
        ranks = []
        for number in ("0", "1"):
            log = folder / f"rank-{number}.log"
            stream = stack.enter_context(log.open("wb"))
            process = forks.fork(
                *("-c", code, "worker", "all", *models),
                environment={**of_both, "RANK": number, "LOCAL_RANK": number},
                cwd=folder,
                stdout=stream,
                stderr=stream,
            )
            ranks.append(WorkerProcess(process, log))
            stack.callback(ranks[-1].kill)
        yield ranks


def ended(rank: WorkerProcess) -> str:
    """What it wrote until it ended."""
    rank.process.wait(WAIT_SEC)
    return rank.text()


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
