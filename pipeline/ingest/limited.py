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
from contextlib import suppress
from pathlib import Path
from typing import IO

_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "TZ")
_QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}


class LimitError(Exception):
    """The child ended before it gave its answer: by a limit, or by a crash."""


class LimitedProcess:
    """`python -m MODULE` with a pipe each way. Not safe to share between threads."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what a crash leaves there; answers come by stdout
            env={name: os.environ[name] for name in _KEPT if name in os.environ} | _QUIET,
            start_new_session=True,  # a terminal's Ctrl-C is ours alone
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in: IO[bytes] = self._process.stdin
        self._out: IO[bytes] = self._process.stdout

    def send(self, *parts: bytes) -> None:
        """Raises `LimitError` where nobody reads it any more."""
        try:
            for part in parts:
                self._in.write(part)
            self._in.flush()
        except (OSError, ValueError):
            raise LimitError(self.how_it_ended()) from None

    def line(self) -> bytes:
        """The next line, without its end. Raises `LimitError`."""
        text = self._out.readline()
        if not text.endswith(b"\n"):
            raise LimitError(self.how_it_ended())
        return text[:-1]

    def exactly(self, size: int) -> bytes:
        """So many bytes. Raises `LimitError`."""
        data = self._out.read(size)
        if len(data) < size:
            raise LimitError(self.how_it_ended())
        return data

    def how_it_ended(self) -> str:
        """In a few words: why there is no answer."""
        self.close()
        code = self._process.returncode
        if code == -signal.SIGPROF:
            return "it took too much processor time"
        if code == -signal.SIGKILL:
            return "its process was killed, maybe for its memory"
        return "it needed too much memory, or crashed"

    def close(self) -> None:
        """End it, whatever it does. It may be closed twice."""
        if self._process.poll() is None:
            for stream in (self._in, self._out):
                with suppress(OSError):
                    stream.close()
            try:
                self._process.wait(0.2)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        for stream in (self._in, self._out):
            with suppress(OSError):
                stream.close()


# --- in the child -------------------------------------------------------------------------------
def limit_memory(more_bytes: int) -> None:
    """From now on this process may have so many bytes more of addresses, and leaves no core."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for kind, most in ((resource.RLIMIT_AS, now + more_bytes), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard < 0 else min(most, hard), hard))


def limit_time(sec: float) -> None:
    """The kernel ends this process when it has computed so long from now; 0: no more of that."""
    signal.setitimer(signal.ITIMER_PROF, sec)
