"""The process beside the engine's: it reads inputs, records groups and publishes.

`specbatch worker all` starts one. In the engine's own process that work would take turns with the
engine at the interpreter's lock, and cores away from its native threads. Here it has a lock of its
own and a lower priority, so it runs where the engine leaves a core free. To everybody else it is
one more worker: it claims by the store, and may die at any time.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

from specbatch.schemas.errors import SpecbatchError, UsageError
from specbatch.schemas.settings import Settings

log = logging.getLogger(__name__)

KINDS = ("ingest", "record")  # what needs no engine
NICENESS = 5
RESTART_SEC = 2.0  # after it died
END_SEC = 15.0  # a little more than tasks have to end


def with_next_port(settings: Settings) -> Settings:
    """The settings, with the port above for metrics: each process serves one of its own.

    Raises `UsageError` unless it is free.
    """
    if not settings.metrics_port:
        return settings
    address, port = settings.metrics_address, settings.metrics_port + 1
    try:
        family, *_, resolved = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0]
        socket.create_server((str(resolved[0]), port), family=family).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"metrics of the second process cannot be served on {address}:{port} ({reason}): "
            "`specbatch worker all` takes SPECBATCH_METRICS_PORT and the port above it"
        ) from None
    return settings.model_copy(update={"metrics_port": port})


class SecondProcess:
    """Starts the process, and restarts it when it dies, until `close`.

    Raises `UsageError` when it could not serve its metrics.
    """

    def __init__(self, settings: Settings, concurrency: int) -> None:
        self._settings = with_next_port(settings)
        self._concurrency = concurrency
        self._closing = threading.Event()
        self._process = self._start()
        self._thread = threading.Thread(target=self._mind, name="beside", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End it; what it cannot end in time goes to others when its leases run out."""
        self._closing.set()
        self._let_go()
        try:
            self._process.wait(END_SEC)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._thread.join()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self._concurrency), str(log.getEffectiveLevel())],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the engine's process's to answer
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
            log.warning("the process that records ended with %d; another is started", code)
            self._let_go()
            if self._closing.wait(RESTART_SEC):
                return
            self._process = self._start()
            if self._closing.is_set():
                self._let_go()


def main() -> None:
    """The process itself: settings come on the first line of stdin, whose end is its end."""
    from specbatch.jobs.cli.console import complain, log_as, log_to_stderr
    from specbatch.workers.lifecycle import run_worker

    settings = Settings.model_validate_json(sys.stdin.buffer.readline())
    log_to_stderr()
    log_as(settings.log_format)
    for name in ("celery", "specbatch"):
        logging.getLogger(name).setLevel(int(sys.argv[2]))
    os.nice(NICENESS)
    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    try:
        run_worker(settings, KINDS, None, (), int(sys.argv[1]))
    except SpecbatchError as error:
        complain(str(error))
        sys.exit(error.exit_code)


def end_with_parent() -> None:
    """However the process ends that started this one, the pipe on stdin is closed then."""
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
