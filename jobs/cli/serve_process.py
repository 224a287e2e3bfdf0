"""The process beside `specbatch serve`: it does the jobs of batches, one at a time.

In the service's own process the engine would take turns with requests at the interpreter's lock,
and a crash of one would be the end of the other. `second_process.py` is the same for workers.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path

from specbatch.jobs.cli.second_process import end_with_parent
from specbatch.schemas.errors import SpecbatchError
from specbatch.schemas.settings import Settings

log = logging.getLogger(__name__)

RESTART_SEC = 2.0  # after it died
END_SEC = 30.0  # for the current step, and to give groups back


class RunnerProcess:
    """Starts the process, and restarts it when it dies, until `close`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._closing = threading.Event()
        self._process = self._start()
        self._thread = threading.Thread(target=self._mind, name="runner", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End it; what it cannot end in time is resumed after the next start."""
        self._closing.set()
        self._let_go()
        try:
            self._process.wait(END_SEC)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._thread.join()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the service's to answer
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already: `_mind` sees it
            # Passwords among them, so neither in the arguments nor in a file.
            process.stdin.write(self._settings.model_dump_json().encode() + b"\n")
            process.stdin.flush()
        return process

    def _let_go(self) -> None:
        with suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def _mind(self) -> None:
        while True:
            code = self._process.wait()
            if self._closing.is_set():
                return
            log.warning("the runner ended with %d; another is started", code)
            self._let_go()
            if self._closing.wait(RESTART_SEC):
                return
            self._process = self._start()
            if self._closing.is_set():
                self._let_go()


def main() -> None:
    """The process itself: settings come on the first line of stdin, whose end is its end."""
    from specbatch.jobs.cli.connect import silent
    from specbatch.jobs.cli.console import INTERRUPTED, complain, log_as, log_to_stderr
    from specbatch.jobs.serve.locks import only_one
    from specbatch.jobs.serve.runner import run_jobs
    from specbatch.pipeline.bootstrap import make_client, make_store

    settings = Settings.model_validate_json(sys.stdin.buffer.readline())
    log_to_stderr()
    log_as(settings.log_format)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    lock = Path(settings.workspace, "runner.lock")
    try:
        # The runner of a service that was killed ends its step first.
        with only_one(lock, True, "another runner"), closing(make_store(settings)) as store:
            run_jobs(settings, store, make_client(settings, silent, store), threading.Event())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except SpecbatchError as error:
        complain(str(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
