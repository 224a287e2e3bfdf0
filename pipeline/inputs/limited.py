"""A child process for what may take all memory, or for ever, or crash: the kernel holds its limits.

A thread cannot be ended, and a library cannot be told to stop. Here the worst is that the child
ends; whoever asked it learns that as `LimitError` and may start another one. It gets none of our
secrets: its environment is what Python and libraries need to start.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO

from specbatch.pipeline.inputs.forkserver import ForkedProcess, fork

_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "TZ")
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # one more would count as 128 MiB of addresses
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # gives back what it does not need
}


class LimitError(Exception):
    """The child ended before it gave its answer: by a limit, or by a crash."""


class KilledError(LimitError):
    """Somebody else killed the child, or the kernel for want of memory: it may not be its fault."""


class LimitedProcess:
    """`main()` of a module, in a process with a pipe each way. Not safe to share between threads.

    It ends at the latest with its last reference, or with this process.
    """

    def __init__(
        self, process: subprocess.Popen[bytes] | ForkedProcess, to: IO[bytes], answers: IO[bytes]
    ) -> None:
        self._process = process
        self._in = to
        self._out = answers
        weakref.finalize(self, _end, process, to, answers)

    @classmethod
    def start(cls, module: str, *arguments: str) -> LimitedProcess:
        """`python -m MODULE`."""
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what a crash leaves there; answers come by stdout
            env=_environment(),
            start_new_session=True,  # a terminal's Ctrl-C is ours alone
        )
        assert process.stdin is not None
        assert process.stdout is not None
        return cls(process, process.stdin, process.stdout)

    @classmethod
    def fork(cls, module: str, *arguments: str) -> LimitedProcess:
        """The same in milliseconds, for many one after the other (`forkserver.py`). Raises
        `KilledError` where none can be started."""
        stdin, to = os.pipe()
        answers, stdout = os.pipe()
        try:
            process = fork(
                module, *arguments, stdin=stdin, stdout=stdout, environment=_environment()
            )
        except OSError as error:
            os.close(to)
            os.close(answers)
            raise KilledError(f"its process cannot be started: {error}") from error
        finally:
            os.close(stdin)
            os.close(stdout)
        return cls(process, os.fdopen(to, "wb"), os.fdopen(answers, "rb"))

    def send(self, *parts: bytes) -> None:
        """Raises `LimitError` where nobody reads it any more."""
        try:
            for part in parts:
                self._in.write(part)
            self._in.flush()
        except (OSError, ValueError):
            raise self.how_it_ended() from None

    def line(self) -> bytes:
        """The next line, without its end. Raises `LimitError`."""
        text = self._out.readline()
        if not text.endswith(b"\n"):
            raise self.how_it_ended()
        return text[:-1]

    def exactly(self, size: int) -> bytes:
        """So many bytes. Raises `LimitError`."""
        data = self._out.read(size)
        if len(data) < size:
            raise self.how_it_ended()
        return data

    def how_it_ended(self) -> LimitError:
        """Why there is no answer."""
        self.close()
        code = self._process.returncode
        if code == -signal.SIGPROF:
            return LimitError("it took too much processor time")
        if code == -signal.SIGKILL:
            return KilledError("its process was killed, maybe for its memory")
        return LimitError("it needed too much memory, or crashed")

    def close(self) -> None:
        """End it, whatever it does. It may be closed twice."""
        _end(self._process, self._in, self._out)


def _end(process: subprocess.Popen[bytes] | ForkedProcess, *streams: IO[bytes]) -> None:
    for stream in streams:
        with suppress(OSError):
            stream.close()
    try:
        process.wait(0.2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _KEPT if name in os.environ} | _QUIET


# --- in the child -------------------------------------------------------------------------------
def size_of_this_process() -> int:
    """Bytes of addresses."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def limit_memory(more_bytes: int) -> None:
    """From now on this process may have so many bytes more of addresses, and leaves no core."""
    for kind, most in (
        (resource.RLIMIT_AS, size_of_this_process() + more_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard < 0 else min(most, hard), hard))


def limit_time(sec: float) -> None:
    """The kernel ends this process when it has computed so long from now; 0: no more of that."""
    signal.setitimer(signal.ITIMER_PROF, sec)
