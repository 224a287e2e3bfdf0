"""`specbatch` in processes of their own, each a fork of one that has imported everything.

Importing torch and transformers takes a worker longer than most tests do. What is forked runs the
command's own `main`, with an environment, arguments, a folder and files of its own; it is killed,
frozen and waited for like any other process. Where it matters how a process came to be (its
arguments in the process list, its imports, its memory), start one from the shell.

    python -m support.forks DESCRIPTOR
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, NoReturn

_MOST_BYTES = 1 << 17  # of a wish
_STATUS = struct.Struct("=i")
_MAINS = {
    "specbatch": "specbatch.jobs.cli.main",
    "submit-job": "specbatch.jobs.cli.submit_job",
}
_WARM = (
    *_MAINS.values(),
    "specbatch.jobs.cli.local",
    "specbatch.jobs.running.here",
    "specbatch.jobs.cli.retry",
    "specbatch.jobs.cli.worker",
    "specbatch.workers.lifecycle",
    "specbatch.pipeline.stages.dispatch",
    "specbatch.pipeline.engines.exact.host",
    "specbatch.pipeline.inputs.columnar",
    "specbatch.pipeline.ledger.sql.migrate",
    "celery.concurrency.thread",
    "kombu.transport.memory",
    "kombu.transport.redis",
    "psycopg",
    "transformers.models.llama.modeling_llama",
)
_ALLOCATORS_THREAD = "jemalloc_bg_thd"  # Arrow's; it is begun anew after a fork
_PR_SET_PDEATHSIG = 1  # of Linux' prctl


class Forked:
    """One such process, with what tests ask of a `subprocess.Popen`."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """How it ended, or None: it runs."""
        return self._poll(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._poll(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _poll(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            told = self._status.recv(_STATUS.size)
            # Nothing: the process that forks is gone, and what it had forked with it.
            self.returncode = _STATUS.unpack(told)[0] if told else -signal.SIGKILL
            self._status.close()
        return self.returncode


def fork(
    *command: str,
    environment: Mapping[str, str],
    cwd: Path,
    stdout: IO[bytes],
    stderr: IO[bytes],
    umask: int | None = None,
) -> Forked:
    """Begin `specbatch …`, `submit-job …`, or `-c CODE …` as Python has it.

    `environment` is added to this process's own. Its LD_PRELOAD is loaded: by another process that
    forks, which is begun when it is first asked for.
    """
    forge = _forge(environment.get("LD_PRELOAD", ""))
    return forge.begin(command, dict(os.environ) | dict(environment), cwd, stdout, stderr, umask)


def run(
    *command: str,
    environment: Mapping[str, str],
    cwd: Path,
    timeout: float,
    umask: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """The same to its end, and what it wrote."""
    with open_memory() as out, open_memory() as err:
        process = fork(
            *command, environment=environment, cwd=cwd, stdout=out, stderr=err, umask=umask
        )
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        texts = [_text_of(stream) for stream in (out, err)]
    return subprocess.CompletedProcess(command, code, *texts)


def together(commands: Sequence[Sequence[str]]) -> list[subprocess.CompletedProcess[str]]:
    """All of these at once, each to its end."""

    def done(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return run(*command, environment={}, cwd=Path.cwd(), timeout=240)

    with ThreadPoolExecutor(len(commands)) as threads:
        return list(threads.map(done, commands))


def open_memory() -> IO[bytes]:
    """A file without a name."""
    return os.fdopen(os.memfd_create("output"), "w+b")


def _text_of(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode(errors="replace")


class _Forge:
    """Our side of the process that forks. Thread-safe."""

    def __init__(self, preloaded: str) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        folder = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.forks", str(theirs.fileno())],
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
                | {"OPENBLAS_NUM_THREADS": "1", "LD_PRELOAD": preloaded},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def begin(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        cwd: Path,
        stdout: IO[bytes],
        stderr: IO[bytes],
        umask: int | None,
    ) -> Forked:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        wish = json.dumps([list(command), dict(environment), str(cwd), umask]).encode()
        assert len(wish) <= _MOST_BYTES
        with theirs, self._lock:
            files = [stdout.fileno(), stderr.fileno(), theirs.fileno()]
            socket.send_fds(self._line, [wish], files)
            answer = self._line.recv(_STATUS.size)
        assert answer, "the process that forks has ended"
        return Forked(_STATUS.unpack(answer)[0], ours)


_BEGINNING = threading.Lock()  # two that begin at once would make one each, and drop one of them


def _forge(preloaded: str) -> _Forge:
    """Begun when it is first needed; it ends with this process."""
    with _BEGINNING:
        return _only_forge(preloaded)


@cache
def _only_forge(preloaded: str) -> _Forge:
    return _Forge(preloaded)


# --- the process that forks -----------------------------------------------------------------
def main(arguments: list[str]) -> int:
    """Fork for each wish, and tell how each of them ended, until nobody listens."""
    for name in _WARM:
        import_module(name)
    names = {path.read_text().strip() for path in Path("/proc/self/task").glob("[0-9]*/comm")}
    threads = names - {Path("/proc/self/comm").read_text().strip(), _ALLOCATORS_THREAD}
    assert not threads, f"they do not come along to what is forked: {threads}"
    gc.collect()
    gc.freeze()  # so that a child's collections neither look at what was imported nor copy it
    line = socket.socket(fileno=int(arguments[0]))
    ended, ends = socket.socketpair()
    for end in (ended, ends):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ends.fileno(), warn_on_full_buffer=False)
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([line, ended], [], [])
        if ended in ready:
            ended.recv(1 << 12)
            _bury(running)
        if line in ready:
            wish, files, _, _ = socket.recv_fds(line, _MOST_BYTES, 3)
            if not wish:
                return 0
            pid = os.fork()
            if pid == 0:
                _become(*json.loads(wish), *files[:2])
            running[pid] = socket.socket(fileno=files[2])
            for file in files[:2]:
                os.close(file)
            line.send(_STATUS.pack(pid))


def _bury(running: dict[int, socket.socket]) -> None:
    for pid in list(running):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            with running.pop(pid) as told, contextlib.suppress(OSError):
                told.send(_STATUS.pack(os.waitstatus_to_exitcode(status)))


def _become(
    command: list[str],
    environment: dict[str, str],
    cwd: str,
    umask: int | None,
    stdout: int,
    stderr: int,
) -> NoReturn:
    """Be the command, as if it had been started by the shell; never back into the loop."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.closerange(3, 1 << 12)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        tempfile.tempdir = None  # it is that of the environment
        if umask is not None:
            os.umask(umask)
        random.seed()
        code = _run(command)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _run(command: list[str]) -> int:
    """Its exit code, once its threads have ended and what is left for the end is done."""
    try:
        if command[0] == "-c":
            sys.argv = ["-c", *command[2:]]
            exec(command[1], {"__name__": "__main__"})
        else:
            sys.argv = command
            import_module(_MAINS[command[0]]).main()
        code: object = 0
    except SystemExit as end:
        code = end.code
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does at its end
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
