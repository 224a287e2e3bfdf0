"""Worker processes for tests: started, looked at, and ended softly, by a crash, or by a freeze.

They are forks (`forks.py`) unless a test asks for processes as the shell starts them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from support import forks

BIN = Path(sys.executable).parent
SOME_KINDS = Path(__file__).with_name("some_kinds.py")
WAIT_SEC = 240.0
END_SEC = 120.0  # of a process that was asked to end, on a machine that is busy
POLL_SEC = 0.02
REST = 3  # times as long as a look took: looks take a quarter of a core at most


@dataclass
class WorkerProcess:
    """`specbatch worker` in a process of its own, and what it wrote."""

    process: subprocess.Popen[bytes] | forks.Forked
    log: Path

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait(END_SEC)

    def freeze(self) -> None:
        """It stays, and does nothing any more, until `thaw`.

        The signal stops a process once one of its threads has seen it; on a busy machine others
        run until then.
        """
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        wait_until("it stands still", lambda: all(_is_stopped(task) for task in tasks.iterdir()))

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> str:
        """Ask it to end, as an orchestrator would; what it wrote."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(END_SEC)
        return self.text()


def _is_stopped(task: Path) -> bool:
    try:
        stat = (task / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
        return True
    return stat.rpartition(")")[2].split()[0] == "T"


@contextmanager
def worker(
    *arguments: str,
    environment: Mapping[str, str],
    cwd: Path,
    name: str = "",
    by_shell: bool = False,
) -> Iterator[WorkerProcess]:
    """`specbatch worker ARGUMENTS`, killed at the end if it still runs."""
    log = cwd / f"worker-{name or arguments[0]}.log"
    with log.open("wb") as stream:
        process: subprocess.Popen[bytes] | forks.Forked
        if by_shell:
            process = _started(
                [str(BIN / "specbatch"), "worker", *arguments], environment, cwd, stream
            )
        else:
            process = forks.fork(
                *("specbatch", "worker", *arguments),
                environment=environment,
                cwd=cwd,
                stdout=stream,
                stderr=stream,
            )
        with _killed_at_the_end(process, log) as one:
            yield one


@contextmanager
def worker_of(
    *kinds: str, models: Sequence[str], environment: Mapping[str, str], cwd: Path
) -> Iterator[WorkerProcess]:
    """A worker of several kinds, with a verifier and a proposer, killed at the end likewise."""
    log = cwd / f"worker-{'-'.join(kinds)}.log"
    command = ("-c", SOME_KINDS.read_text(), ",".join(kinds), *models)
    with log.open("wb") as stream:
        begun = forks.fork(*command, environment=environment, cwd=cwd, stdout=stream, stderr=stream)
        with _killed_at_the_end(begun, log) as one:
            yield one


def _started(
    command: Sequence[str], environment: Mapping[str, str], cwd: Path, stream: IO[bytes]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=os.environ | environment,
        cwd=cwd,
        stdout=stream,
        stderr=subprocess.STDOUT,
    )


@contextmanager
def _killed_at_the_end(
    process: subprocess.Popen[bytes] | forks.Forked, log: Path
) -> Iterator[WorkerProcess]:
    try:
        yield WorkerProcess(process, log)
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def command(*arguments: str, environment: Mapping[str, str], cwd: Path) -> dict[str, Any]:
    """Run `submit-job` or `specbatch … --json` to its end; its last line."""
    done = forks.run(*arguments, "--json", environment=environment, cwd=cwd, timeout=WAIT_SEC + 60)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def wait_until(
    what: str,
    condition: Any,
    workers: Sequence[WorkerProcess] = (),
    sec: float = WAIT_SEC,
    poll_sec: float | None = None,
) -> Any:
    """Look again and again until `condition()` is true; what it returned."""
    deadline = time.monotonic() + sec
    while (began := time.monotonic()) < deadline:
        if found := condition():
            return found
        for one in workers:
            assert one.process.poll() is None, f"a worker died: {one.text()[-2000:]}"
        rest_sec = max(POLL_SEC, REST * (time.monotonic() - began))
        time.sleep(rest_sec if poll_sec is None else poll_sec)
    logs = "".join(f"\n{one.log.name}:\n{one.text()[-3000:]}" for one in workers)
    raise AssertionError(f"not within {sec:.0f} s: {what}{logs}")
