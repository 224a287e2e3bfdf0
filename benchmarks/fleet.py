"""Worker processes with the stand-in engine, started together and waited for until all listen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from specbatch.benchmarks.stand_in_worker import READY
from specbatch.schemas.settings import Settings

END_SEC = 60.0


@dataclass(slots=True)
class Fleet:
    """Process ids by name."""

    pids: dict[str, int] = field(default_factory=dict)


@contextmanager
def fleet(
    settings: Settings, model: Path, workers: Mapping[str, Sequence[str]], logs: Path
) -> Iterator[Fleet]:
    """`workers`: the arguments of `stand_in_worker` by name. All of them end with the block."""
    environment = os.environ | {
        "SPECBATCH_BROKER_URL": settings.broker_url,
        "SPECBATCH_DATABASE_URL": settings.database_url,
        "SPECBATCH_WORKSPACE": settings.workspace,
        "SPECBATCH_SWEEP_INTERVAL_SEC": str(settings.sweep_interval_sec),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    running: list[subprocess.Popen[str]] = []
    found = Fleet()
    try:
        for name, arguments in workers.items():
            with (logs / f"{name}.log").open("w") as log:
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "specbatch.benchmarks.stand_in_worker"),
                        *("--model", str(model), *arguments),
                    ],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            running.append(process)
            found.pids[name] = process.pid
        for name, process in zip(workers, running, strict=True):
            assert process.stdout is not None, "it is a pipe"
            if process.stdout.readline().strip() != READY:
                log_text = (logs / f"{name}.log").read_text()
                raise SystemExit(f"worker {name} did not start: {log_text[-2000:]}")
        yield found
    finally:
        for process in running:
            process.terminate()
        for process in running:
            _wait(process)


def _wait(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(END_SEC)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
