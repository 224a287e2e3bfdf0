"""How a worker ends: on a signal, after a lost device or broker, to start anew, or at once."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

from celery.concurrency.thread import TaskPool
from celery.signals import worker_shutting_down
from celery.worker import state

from specbatch.pipeline.bootstrap import Worker
from specbatch.schemas.errors import BrokerLostError, DeviceLostError

log = logging.getLogger(__name__)


class FatalShutdown:
    """Ends this process's worker after a lost device or broker. Tasks that run finish first.

    It sets the flag that Celery's own signal handlers set; the loop checks it every second or two.
    The flag is global, so it is reset when the worker has stopped.
    """

    def __init__(self) -> None:
        self.error: DeviceLostError | BrokerLostError | None = None

    def __call__(self, error: DeviceLostError | BrokerLostError) -> None:
        if self.error is None:
            log.critical("the worker ends, its groups are given back: %s", error)
            self.error = error
        state.should_stop = error.exit_code

    def __enter__(self) -> FatalShutdown:
        return self

    def __exit__(self, *_: object) -> None:
        if self.error is not None:
            state.should_stop = None


class GracefulShutdown:
    """Gives tasks some time to finish once a signal asks the worker to end; then stops engines.

    Celery waits for its tasks for as long as they take, which may be longer than an orchestrator
    waits. A task whose engine stops gives its group back. Nothing waits for engines here: one may
    be loading its model. A second signal, or a cold shutdown, ends the wait at once.
    """

    def __init__(self, worker: Worker, patience_sec: float) -> None:
        self._worker = worker
        self._patience_sec = patience_sec
        self._is_over = False
        self._waited = threading.Event()  # enough, or the worker has ended
        self._thread: threading.Thread | None = None

    def __enter__(self) -> GracefulShutdown:
        worker_shutting_down.connect(self._begin, weak=False)
        return self

    def __exit__(self, *_: object) -> None:
        worker_shutting_down.disconnect(self._begin)
        self._is_over = True
        self._waited.set()
        if self._thread is not None:
            self._thread.join()

    def _begin(self, how: str = "Warm", **_: object) -> None:
        self._worker.outage.close()
        if how == "Cold":
            self._waited.set()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._wait, name="graceful-shutdown", daemon=True
            )
            self._thread.start()

    def _wait(self) -> None:
        self._waited.wait(self._patience_sec)
        if not self._is_over:
            log.info("groups in hand are given back")
            for host in self._worker.engines:
                host.stop()


class LossNotice:
    """Ends this process's worker once a file says that its device is about to be taken away.

    Its groups are given back at once: those who warn leave little time, and another worker resumes
    them. Beside `GracefulShutdown`, which stops the engines.
    """

    def __init__(self, path: str, every_sec: float = 0.5) -> None:
        """`path`: of the file; empty: nobody warns."""
        self._path = path
        self._every_sec = every_sec
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loss-notice", daemon=True)

    def __enter__(self) -> LossNotice:
        if self._path:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._is_there():
            if self._stop.wait(self._every_sec):
                return
        log.warning("%s is there: this device is about to be taken away", self._path)
        worker_shutting_down.send(sender=self, sig="LOSS", how="Cold", exitcode=0)
        state.should_stop = 0  # as Celery's handler of SIGTERM sets it

    def _is_there(self) -> bool:
        try:
            return Path(self._path).exists()
        except OSError:  # this user may not look there, now
            return False


class Restart:
    """Ends this process's worker as SIGTERM would, for it to start anew. Whoever sends a signal
    wants it to end: then it does not start anew."""

    def __init__(self) -> None:
        self._wanted = False
        self._signalled = False

    def __call__(self) -> None:
        self._wanted = True
        worker_shutting_down.send(sender=self, sig=None, how="Warm", exitcode=0)
        state.should_stop = 0  # as Celery's handler of SIGTERM sets it

    def __enter__(self) -> Restart:
        worker_shutting_down.connect(self._note, weak=False)
        return self

    def __exit__(self, *_: object) -> None:
        """No handler that only notes a signal may be left when it can no longer be looked at."""
        if self._wanted:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
        worker_shutting_down.disconnect(self._note)

    def _note(self, sig: object = None, **_: object) -> None:
        if sig is not None:
            self._signalled = True

    @property
    def is_due(self) -> bool:
        """Once the worker has ended. From then on signals end the process."""
        return self._wanted and not self._signalled


def start_anew() -> NoReturn:
    """Replace this process with a new one of the same command line, environment and number."""
    atexit._run_exitfuncs()  # among others, ends the processes that it has started
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def end_at_once(error: DeviceLostError) -> NoReturn:
    """End the process with the error's exit code. An ordinary end would wait for the native threads
    of a step that hangs, or for ranks that are out of step."""
    log.critical("%s", error)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(error.exit_code)


class Threads(TaskPool):  # type: ignore[misc]  # celery has no types
    """Celery's pool of threads: one process, one engine, many waiting groups.

    Celery's own raises where a second Ctrl-C, or SIGQUIT, asks it to end a task.
    """

    def terminate_job(self, pid: int, signal: int | None = None) -> None:  # noqa: ARG002 - celery's
        """A thread cannot be ended: its group is given back when its engine stops. Celery announces
        its shutdown only after it has waited for the threads, so announce it here."""
        worker_shutting_down.send(sender=self, sig=signal, how="Cold", exitcode=None)
