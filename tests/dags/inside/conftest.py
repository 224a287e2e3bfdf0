"""For tests that run in the environment of a scheduler: a store, a worker, and its jobs.

These files are run by `tests/dags/test_inside.py`, one process for each environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from specbatch.jobs.client import JobClient, Outcome, open_client
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.settings import Settings

WAIT_SEC = 300.0  # on a machine that does much else
WRITE_MODEL = """
import pathlib, sys
from specbatch.jobs.chaos.stand_in_model import write_model
write_model(pathlib.Path(sys.argv[1]))
"""
GROUP = 4  # rows: the worker does one group after another


@dataclass
class Site:
    """A store, and the one worker that serves it. `env` says where to all processes of a test."""

    folder: Path
    env: dict[str, str]
    model: str
    worker: subprocess.Popen[str]
    client: JobClient
    store: Store
    _number: list[int] = field(default_factory=list)

    def prompts(self, good: int, refused: int = 0, failing: int = 0) -> str:
        """A file with rows that are done, that the input's check refuses, and that fail."""
        self._number.append(0)
        path = self.folder / f"prompts-{len(self._number)}.jsonl"
        texts: list[str | None] = [f"The story of {i} sailors and" for i in range(good)]
        texts += [None] * refused + ["~ no model continues this"] * failing
        path.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
        return str(path)

    def spec(self, prompts: str, **more: Any) -> dict[str, Any]:
        """A job of these prompts, with an output of its own."""
        self._number.append(0)
        return {
            "name": "in-a-dag",
            "input": {"uri": prompts},
            "output": {"uri": str(self.folder / f"out-{len(self._number)}")},
            "verifier": self.model,
            "sampling": {"max_tokens": 12, "seed": 5},
            "group_size": GROUP,
        } | more

    def jobs(self, output_uri: str) -> list[str]:
        """All jobs with this output, the newest first."""
        return [j.job_id for j in self.store.list_jobs(1000) if j.output_uri == output_uri]

    def freeze_in_the_middle(self, output_uri: str) -> str:
        """Stop the worker when a group of the job is done, and others are not; the job's id."""
        self.until(lambda: self.jobs(output_uri), "the job to be submitted")
        (job,) = self.jobs(output_uri)
        self.until(lambda: self.client.outcome(job).completions >= GROUP, "a group to be done")
        self.freeze()
        assert not self.client.poll(job).is_final
        return job

    def freeze(self) -> None:
        """Stop the worker where it holds no lock of the store."""
        while True:
            self.worker.send_signal(signal.SIGSTOP)
            if self._is_writable():
                break
            self.thaw()  # it was writing

    def _is_writable(self) -> bool:
        with contextlib.closing(sqlite3.connect(self.folder / "specbatch.db", 0.1)) as store:
            try:
                store.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return False
            return True

    def thaw(self) -> None:
        self.worker.send_signal(signal.SIGCONT)

    def end(self, job_id: str) -> Outcome:
        """Wait for the job's end."""
        self.until(lambda: self.client.poll(job_id).is_final, "the job to end")
        return self.client.outcome(job_id)

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + WAIT_SEC
        while not (found := condition()):
            assert self.worker.poll() is None, (self.folder / "worker.log").read_text()[-3000:]
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            time.sleep(0.05)
        return found


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The run's site. Its worker runs in the environment that has the engine's packages."""
    folder = tmp_path_factory.mktemp("site")
    env = {
        "SPECBATCH_DATABASE_URL": f"sqlite:///{folder / 'specbatch.db'}",
        "SPECBATCH_WORKSPACE": str(folder / "work"),
        "SPECBATCH_SWEEP_INTERVAL_SEC": "0.5",
    }
    os.environ.update(env)
    python, model = os.environ["SPECBATCH_TEST_PYTHON"], folder / "model"
    subprocess.run([python, "-c", WRITE_MODEL, str(model)], check=True)
    with (folder / "worker.log").open("w") as log:
        worker = subprocess.Popen(
            [
                *(python, "-m", "specbatch.benchmarks.stand_in_worker"),
                *("--model", str(model), "--kinds", "ingest", "verify", "record"),
                *("--step-sec", "0.05", "--max-sequences", str(GROUP), "--concurrency", "4"),
            ],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    client = None
    try:
        assert worker.stdout is not None
        said = worker.stdout.readline()
        assert said.strip() == "ready", (folder / "worker.log").read_text()[-3000:]
        client = open_client()
        store = make_store(Settings())
        yield Site(folder, env, str(model), worker, client, store)
        store.close()
    finally:
        if client is not None:
            client.close()
        worker.kill()
        worker.wait()
