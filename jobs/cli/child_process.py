"""A process beside this one, of the same settings: restarted when it dies, ended with this one."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from specbatch.schemas.settings import Settings

log = logging.getLogger(__name__)

RESTART_SEC = 2.0  # after it died


class ChildProcess:
    """Starts `python -m` with the arguments, and again when it dies, until `close`.

    The settings are the first line of its stdin, whose end is its end: see `end_with_parent`.
    """

    def __init__(
        self, arguments: Sequence[str], settings: Settings, what: str, end_sec: float
    ) -> None:
        """`what`: its name in the log. `end_sec`: how long it may take to end."""
        self._arguments = list(arguments)
        self._settings = settings
        self._what = what
        self._end_sec = end_sec
        self._closing = threading.Event()
        self._process = self._start()
        self._thread = threading.Thread(target=self._supervise, name=what, daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End it; what it cannot end in time is done by others, or after the next start."""
        self._closing.set()
        self._close_stdin()
        try:
            self._process.wait(self._end_sec)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._thread.join()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", *self._arguments],  # no modules of the current folder
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is this process's to answer
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already: `_supervise` sees it
            # The settings hold passwords. Others can read arguments, and a file would stay.
            process.stdin.write(self._settings.model_dump_json().encode() + b"\n")
            process.stdin.flush()
        return process

    def _close_stdin(self) -> None:
        with suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def _supervise(self) -> None:
        while True:
            code = self._process.wait()
            if self._closing.is_set():
                return
            log.warning("%s ended with %d; another is started", self._what, code)
            self._close_stdin()
            if not self._start_again():
                return
            if self._closing.is_set():
                self._close_stdin()

    def _start_again(self) -> bool:
        """As soon as the machine lets it; False: it is closed before."""
        while not self._closing.wait(RESTART_SEC):
            try:
                self._process = self._start()
            except OSError as error:  # no memory, or too many processes
                log.warning("%s cannot be started now; will retry: %s", self._what, error)
            else:
                return True
        return False


def end_with_parent() -> None:
    """However the process ends that started this one, the pipe on stdin is closed then."""
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)
