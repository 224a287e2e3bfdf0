"""What a worker process tells the store of itself: that it is there, whether it can take messages,
and which models it serves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import StoreError
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.presence import WorkerProcess

log = logging.getLogger(__name__)

POLL_SEC = 0.5  # between two checks for a change
AGAIN_SEC = 10.0  # between two attempts to tell a store that refused


class Presence:
    """Reports at its start, at every change and at every heartbeat, in a thread of its own."""

    def __init__(
        self,
        store: Store,
        process: WorkerProcess,
        trouble: Callable[[], str | None],
        beat_sec: float,
    ) -> None:
        """`trouble` returns why no messages can be taken, or None if they can."""
        self._store = store
        self._process = process
        self._trouble = trouble
        self._beat_sec = beat_sec
        self._failure = ""  # that was logged, and is not over
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Tell the store that the process has ended."""
        self._stop.set()
        if self._thread.ident is None:
            return
        self._thread.join()
        try:
            self._store.forget_process(self._process.process_id)
        except StoreError as error:
            log.log(_level(error), "could not deregister this process; it will time out: %s", error)

    def _run(self) -> None:
        report_at = time.monotonic()
        reported: bool | None = None  # whether it can take messages, by the last report
        while not self._stop.wait(POLL_SEC):
            trouble = self._trouble()
            if time.monotonic() < report_at and reported == (trouble is None):
                continue
            reported = trouble is None  # also if the store refuses: it is not asked at every check
            wait_sec = self._beat_sec if self._report(trouble) else min(AGAIN_SEC, self._beat_sec)
            report_at = time.monotonic() + wait_sec

    def _report(self, trouble: str | None) -> bool:
        """Whether the store took it. A repeated failure is logged once."""
        try:
            self._store.report_process(self._process, trouble)
        except StoreError as error:
            if str(error) != self._failure:
                self._failure = str(error)
                what = "could not announce this process to the store; will retry: %s"
                log.log(_level(error), what, error)
            return False
        self._failure = ""
        return True


def _level(error: StoreError) -> int:
    """Stages report a store that refuses writes; here it is only a note."""
    return logging.INFO if error.refused else logging.WARNING


class ServedModels:
    """Finds out which models this process serves, without making a heartbeat wait for their files.

    That may mean to digest a hundred gigabytes, in which leases would run out. So a thread of its
    own asks `find`, and callers get the last answer. Thread-safe.
    """

    def __init__(self, find: Callable[[], Serves], wait_sec: float) -> None:
        """`wait_sec`: how long a caller waits for an answer; far below a lease."""
        self._find = find
        self._wait_sec = wait_sec
        self._last: Serves | None = None
        self._finding = False
        self._lock = threading.Lock()

    def __call__(self) -> Serves | None:
        """What is served now, if that is soon known; else the last answer, or None without one.

        Claims ask the engine host itself.
        """
        with self._lock:
            begins, self._finding = not self._finding, True
        if begins:
            found = threading.Event()
            threading.Thread(
                target=self._run, args=(found,), name="served-models", daemon=True
            ).start()
            found.wait(self._wait_sec)
        return self._last

    def _run(self, found: threading.Event) -> None:
        try:
            self._last = self._find()
        except Exception:
            log.exception(
                "could not find out what this worker serves; will retry at the next heartbeat"
            )
        finally:
            with self._lock:
                self._finding = False
            found.set()
