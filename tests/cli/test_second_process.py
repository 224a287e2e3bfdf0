"""`specbatch worker all` is two processes: one with the engine, one for all that needs none."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
from cli.conftest import write

from specbatch.jobs.cli.second_process import with_next_port
from specbatch.pipeline.outputs.outputs import read_output
from specbatch.schemas.errors import UsageError
from specbatch.schemas.settings import Settings
from support.models import TinyPair
from support.scraping import scrape
from support.servers import free_port
from support.workers import WorkerProcess, command, wait_until, worker

pytestmark = pytest.mark.pipeline  # starts processes

ROWS = 12


@pytest.fixture
def models(tiny_pair: TinyPair) -> tuple[str, ...]:
    return ("--verifier", str(tiny_pair.verifier), "--proposer", "none")


def beside(one: WorkerProcess) -> list[int]:
    """The processes that it started for the work without an engine, and that run."""
    found = []
    for children in Path(f"/proc/{one.process.pid}/task").glob("*/children"):
        found += [pid for pid in map(int, children.read_text().split()) if runs(pid)]
    return found


def runs(pid: int) -> bool:
    try:
        return b"specbatch.jobs.cli.second_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
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
    redis_url: str, tmp_path: Path, models: tuple[str, ...]
) -> None:
    write(tmp_path / "prompts.parquet", [f"def f{i}(x):" for i in range(ROWS)])
    job = ("submit-job", "--input", "prompts.parquet", "--output", "out", *models)
    port = free_port()
    environment = environment_of(redis_url, tmp_path) | {"SPECBATCH_METRICS_PORT": str(port)}
    with worker("all", *models, environment=environment, cwd=tmp_path) as one:
        (killed,) = wait_until("it runs", lambda: beside(one), [one])
        os.kill(killed, signal.SIGKILL)
        wait_until("another runs", lambda: beside(one) not in ([], [killed]), [one])
        (another,) = beside(one)
        more = ("--max-tokens", "4", "--wait")
        command(*job, *more, environment=environment, cwd=tmp_path)
        assert read_output(str(tmp_path / "out")).num_rows == ROWS
        # Each serves what it counts on a port of its own, the new one too.
        assert scrape(port).total("specbatch_engine_verifier_calls_total") > 0
        assert scrape(port + 1).total("specbatch_completions_total") == ROWS
        assert niceness(another) > niceness(one.process.pid)
        assert f"ended with -{int(signal.SIGKILL)}; another is started" in one.text()
        one.kill()
        wait_until("it has ended too", lambda: not runs(another))


def test_a_worker_that_is_asked_to_end_takes_the_process_beside_along(
    redis_url: str, tmp_path: Path, models: tuple[str, ...]
) -> None:
    environment = environment_of(redis_url, tmp_path)
    with worker("all", *models, environment=environment, cwd=tmp_path) as one:
        (other,) = wait_until("it runs", lambda: beside(one), [one])
        wait_until("it listens", lambda: "worker for" in one.text(), [one])
        one.end()
        wait_until("it has ended too", lambda: not runs(other))


def test_the_second_process_serves_metrics_on_the_next_port_if_it_is_free() -> None:
    assert with_next_port(Settings()) == Settings()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for wanted, why in ((port - 1, "Address already in use"), (65535, "port must be 0-65535")):
            with pytest.raises(UsageError) as met:
                with_next_port(Settings(metrics_port=wanted))
            assert f"127.0.0.1:{wanted + 1} (" in str(met.value)
            assert why in str(met.value)
    assert with_next_port(Settings(metrics_port=port - 1)).metrics_port == port
