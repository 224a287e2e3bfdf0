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


class Presence:
    """Says so when it starts, whenever that changes, and at every heartbeat, in its own thread."""

    def __init__(
        self,
        store: Store,
        process: WorkerProcess,
        trouble: Callable[[], str | None],
        beat_sec: float,
        told: Callable[[str | None], None] = lambda _: None,
    ) -> None:
        """`trouble`: why no messages can be taken, None: they can. `told` hears of each look."""
        self._store = store
        self._process = process
        self._trouble = trouble
        self._beat_sec = beat_sec
        self._told = told
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
        beat_at, could = time.monotonic(), None
        while not self._stop.wait(LOOK_SEC):
            now, trouble = time.monotonic(), self._trouble()
            self._told(trouble)
            if now < beat_at and could == (trouble is None):
                continue
            beat_at = now + self._beat_sec
            try:
                self._store.tell_process(self._process, trouble)
                could = trouble is None
            except StoreError as error:
                log.log(_level(error), "this process says later that it is there: %s", error)


def _level(error: StoreError) -> int:
    """Whatever has work to write reports a store that refuses writes; here it is a note."""
    return logging.INFO if error.refused else logging.WARNING
