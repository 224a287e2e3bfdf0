"""Tells the store that this worker process is there, and whether it can take messages."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import StoreError
from specbatch.schemas.presence import WorkerProcess

log = logging.getLogger(__name__)

LOOK_SEC = 0.5  # between two looks at whether something has changed
AGAIN_SEC = 10.0  # between two attempts to tell a store that did not take it


class Presence:
    """Says so when it starts, whenever that changes, and at every heartbeat, in its own thread."""

    def __init__(
        self,
        store: Store,
        process: WorkerProcess,
        trouble: Callable[[], str | None],
        beat_sec: float,
    ) -> None:
        """`trouble`: why no messages can be taken, None: they can."""
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
        """It has ended."""
        self._stop.set()
        if self._thread.ident is None:
            return
        self._thread.join()
        try:
            self._store.forget_process(self._process.process_id)
        except StoreError as error:
            log.log(_level(error), "this process counts as alive for a while: %s", error)

    def _run(self) -> None:
        tell_at, told = time.monotonic(), None  # whether it can, as the store was told last
        while not self._stop.wait(LOOK_SEC):
            trouble = self._trouble()
            if time.monotonic() < tell_at and told == (trouble is None):
                continue
            told = trouble is None  # also where the store refuses: it is not asked at every look
            wait_sec = self._beat_sec if self._tell(trouble) else min(AGAIN_SEC, self._beat_sec)
            tell_at = time.monotonic() + wait_sec

    def _tell(self, trouble: str | None) -> bool:
        """Whether the store took it. The same failure again and again is logged once."""
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
    """Whatever has work to write reports a store that refuses writes; here it is a note."""
    return logging.INFO if error.refused else logging.WARNING
