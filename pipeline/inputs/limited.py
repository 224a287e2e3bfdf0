"""Child processes with limits, for work that may take all memory, run for ever, or crash.

Nothing can end a thread or stop a library. Here at worst the child ends: its caller gets a
`LimitError` and may start another one. The kernel enforces the limits. A child gets none of our
secrets: its environment holds only what Python and libraries need to start.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO

from specbatch.pipeline.inputs.forkserver import ForkedProcess, fork

_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH")
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # one more would count as 128 MiB of addresses
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # gives back what it does not need
}


class LimitError(Exception):
    """The child ended before it answered, at a limit or by a crash."""


class KilledError(LimitError):
    """Another process killed the child, or the kernel ran out of memory. Its work may be fine."""


class LimitedProcess:
    """Runs `main()` of a module in a process with a pipe each way. Not safe to share by threads.

    The process ends with its last reference, or with this process, at the latest.
    """

    def __init__(self, process: ForkedProcess, to: IO[bytes], answers: IO[bytes]) -> None:
        self._process = process
        self._in = to
        self._out = answers
        weakref.finalize(self, _end, process, to, answers)

    @classmethod
    def fork(cls, module: str, *arguments: str) -> LimitedProcess:
        """Start one in milliseconds from a forkserver (`forkserver.py`). Raises `KilledError` if
        none can be started."""
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
        """Send bytes to the child. Raises `LimitError` if it no longer reads."""
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
        """The next `size` bytes. Raises `LimitError`."""
        data = self._out.read(size)
        if len(data) < size:
            raise self.how_it_ended()
        return data

    def how_it_ended(self) -> LimitError:
        """The reason why there is no answer."""
        self.close()
        code = self._process.returncode
        if code == -signal.SIGPROF:
            return LimitError("it took too much processor time")
        if code == -signal.SIGKILL:
            return KilledError("its process was killed, perhaps because it used too much memory")
        return LimitError("it needed too much memory, or crashed")

    def close(self) -> None:
        """End the child, whatever it does. May be called twice."""
        _end(self._process, self._in, self._out)


def _end(process: ForkedProcess, *streams: IO[bytes]) -> None:
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
    """Size of the address space in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def limit_memory(more_bytes: int) -> None:
    """Let this process's address space grow by at most so many bytes, and dump no core."""
    for kind, most in (
        (resource.RLIMIT_AS, size_of_this_process() + more_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard < 0 else min(most, hard), hard))


def limit_time(sec: float) -> None:
    """Let the kernel end this process after so much processor time; 0 removes the limit."""
    signal.setitimer(signal.ITIMER_PROF, sec)
